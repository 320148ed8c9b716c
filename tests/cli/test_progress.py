"""What a load shows on a terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from longwire.cli.progress import load_progress
from longwire.client.uploader import Delivery
from longwire.transport.endpoint import Endpoint

A, B, IDLE = Endpoint("a", 1), Endpoint("b", 2), Endpoint("idle", 3)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(2_000_000))
    return path


def shown(model: Path, console: Console) -> str:
    """The last that was drawn while both workers are halfway."""
    with load_progress(console, str(model)) as progress:
        for done in (100_000, 500_000):
            progress.on_progress(done / 1e6)
            progress.on_delivery(
                [
                    Delivery(A, done, 1_000_000, 0),
                    Delivery(B, done, 1_000_000, done),
                    Delivery(IDLE, 0, 0, 0),
                ]
            )
        progress._progress.refresh()
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()


def test_a_line_for_the_model_and_for_each_worker(model: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=140)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown(model, console))
    lines = [line for line in re.split(r"[\r\n]+", text) if "loading" in line][-3:]
    assert "model.gguf" in lines[0] and "1.0/2.0 MB" in lines[0]
    assert "a:1" in lines[1] and "0.5/1.0 MB" in lines[1]
    assert "already" not in lines[1]
    assert "b:2" in lines[2] and "500.0 kB were there already" in lines[2]
    assert "idle" not in text


def test_nothing_where_nobody_looks(model: Path) -> None:
    assert shown(model, Console(file=io.StringIO())) == ""
