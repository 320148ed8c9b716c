from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from longwire.bench.client import Measurement
from longwire.bench.report import LOCAL, Report
from longwire.bench.settings import PAIRS, Plan, Settings

OURS, REFERENCE = "longwire-longwire", "cpp-cpp"


def report_of(
    bench: str, model: Path, values: Mapping[str, Sequence[float | str]]
) -> Report:
    """A report with these values; a string is a failed run."""
    settings = Settings(bench, model=str(model), runs=len(values[OURS]))
    pairs = tuple(pair for pair in PAIRS if str(pair) in values)
    report = Report(settings, Plan("engine", 7, pairs, None), "model.gguf", 1)
    for name, results in values.items():
        for value in results:
            if not isinstance(value, str):
                report.add(name, measurement(name, value))
            else:
                report.add(name, value)
    return report


def measurement(name: str, value: float) -> Measurement:
    wire = {"round_trips": 1.0, "bytes_sent": value, "bytes_received": 3.0}
    wire |= {"graphs": 0.0, "recomputes": 1.0, "wait_s": 0.5, "bytes_saved": 7.0}
    known = wire if name.startswith("longwire") else None
    return Measurement(value, [1], "e", known)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.touch()
    return path


def test_a_ratio_is_the_median_of_the_runs_ratios(model: Path) -> None:
    # The ratio of the medians would be 2.
    values = {OURS: [10.0, 20.0, 30.0], REFERENCE: [10.0, 4.0, 30.0]}
    found = report_of("decode", model, values).as_json()
    assert found["ratio"] == {OURS: 1.0}
    assert found["ratio_spread"][OURS] == {"median": 1.0, "min": 1.0, "max": 5.0}
    assert found["spread"][OURS] == {"median": 20.0, "min": 10.0, "max": 30.0}


def test_hop_subtracts_the_local_run_and_inverts(model: Path) -> None:
    values = {LOCAL: [100.0, 110.0], OURS: [150.0, 160.0], REFERENCE: [300.0, 260.0]}
    found = report_of("hop", model, values).as_json()
    assert found["unit"] == "us/token" and found["lower_is_better"]
    assert found["pairs"] == {OURS: [50.0, 50.0], REFERENCE: [200.0, 150.0]}
    assert found["total"] == {OURS: values[OURS], REFERENCE: values[REFERENCE]}
    assert found["local"] == values[LOCAL]
    assert found["ratio"] == {OURS: 3.5}


def test_a_cost_below_zero_makes_no_ratio(model: Path) -> None:
    values = {LOCAL: [100.0, 100.0], OURS: [90.0, 150.0], REFERENCE: [300.0, 200.0]}
    assert report_of("hop", model, values).ratios(OURS) == [None, 2.0]


def test_a_failed_run_keeps_its_place_and_its_reason(model: Path) -> None:
    ours, reference = [10.0, 12.0, 14.0], [5.0, "it died", 7.0]
    values: dict[str, list[Any]] = {OURS: ours, REFERENCE: reference}
    found = report_of("decode", model, values).as_json()
    assert found["pairs"][REFERENCE] == [5.0, None, 7.0]
    assert found["errors"] == {REFERENCE: ["run 2: it died"]}
    assert found["ratio"] == {OURS: 2.0}


def test_without_the_reference_there_is_no_ratio(model: Path) -> None:
    found = report_of("decode", model, {OURS: [10.0]}).as_json()
    assert found["ratio"] == found["ratio_spread"] == {}
    assert found["pairs"] == {OURS: [10.0]}


def test_nothing_but_failures(model: Path) -> None:
    found = report_of("decode", model, {OURS: ["a"], REFERENCE: ["b"]}).as_json()
    assert found["ratio"] == found["spread"] == found["wire"] == {}


def test_the_wire_is_the_median_and_of_our_client_alone(model: Path) -> None:
    values = {OURS: [10.0, 20.0, 60.0], REFERENCE: [1.0, 1.0, 1.0]}
    wire = report_of("decode", model, values).as_json()["wire"]
    assert wire == {
        OURS: {
            "round_trips": 1.0,
            "bytes_sent": 20.0,
            "bytes_received": 3.0,
            "bytes_saved": 7.0,
            "graphs": 0.0,
            "recomputes": 1.0,
        }
    }


def test_the_run_that_made_the_index_is_named(model: Path) -> None:
    report = report_of("load", model, {OURS: [10.0]})
    for seconds in (2.5, 0.01):
        report.add(OURS, Measurement(10.0, [1], "e", None, index_s=seconds))
    assert report.as_json()["index_s"] == {OURS: {2: 2.5}}


def test_other_tokens_are_noticed(model: Path) -> None:
    report = report_of("decode", model, {OURS: [10.0], REFERENCE: [5.0]})
    assert report.tokens_equal()
    report.add(OURS, Measurement(10.0, [2], "e", None))
    assert not report.tokens_equal()
