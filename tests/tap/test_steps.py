"""Where steps begin and end, and what they cost."""

from __future__ import annotations

import pytest

from longwire.tap.steps import GRAPHS, READS, Step, StepCounter
from longwire.wire.constants import Command
from longwire.wire.trace import Event, Request, Undecoded
from support.traced import answer, request

C = Command


def steps(*events: Event) -> list[Step]:
    counter = StepCounter()
    found = (counter.put(event) for event in events)
    return [step for step in found if step is not None]


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("graph", GRAPHS)
def test_one_round_trip(graph: Command, read: Command) -> None:
    reading = request(read, 3.0, 3.5, 300)
    found = steps(
        request(C.SET_TENSOR, 1.0, 1.0, 400),
        request(graph, 2.0, 2.0, 20),
        reading,
        answer(reading, 7.0, 9.0, 1000),
    )
    assert found == [Step(2.0, 9.0, 1, 3, 720, 1000, 1, 3.5)]
    assert found[0].took_s == 7.0


def test_one_after_the_other() -> None:
    events: list[Event] = []
    for i in range(3):
        reading = request(C.GET_TENSOR, 10.0 * i + 1)
        events += [
            request(C.SET_TENSOR, 10.0 * i),
            request(C.GRAPH_RECOMPUTE, 10.0 * i),
            reading,
            answer(reading, 10.0 * i + 5),
        ]
    found = steps(*events)
    assert [(s.begun_s, s.ended_s, s.commands) for s in found] == [
        (0.0, 5.0, 3),
        (10.0, 15.0, 3),
        (20.0, 25.0, 3),
    ]


def test_reads_that_are_waited_for_together_are_one_round_trip() -> None:
    one, two = request(C.GET_TENSOR, 2.0), request(C.GET_TENSOR, 3.0)
    graph = request(C.GRAPH_COMPUTE, 1.0)
    (step,) = steps(graph, one, two, answer(one, 5.0), answer(two, 6.0))
    assert (step.round_trips, step.wait_s, step.ended_s) == (1, 4.0, 6.0)


def test_a_question_within_does_not_end_it() -> None:
    ask = request(C.GET_ALLOC_SIZE, 2.0)
    reading = request(C.GET_TENSOR, 4.0)
    graph = request(C.GRAPH_COMPUTE, 1.0)
    (step,) = steps(graph, ask, answer(ask, 3.0), reading, answer(reading, 9.0))
    assert (step.commands, step.round_trips, step.wait_s) == (3, 2, 6.0)


def test_what_was_asked_before_is_none_of_its() -> None:
    ask, reading = request(C.ALLOC_BUFFER, 1.0), request(C.GET_TENSOR, 3.0)
    (step,) = steps(
        request(C.SET_TENSOR, 0.0),
        ask,
        answer(ask, 1.5),
        request(C.GRAPH_COMPUTE, 2.0),
        reading,
        answer(reading, 4.0),
    )
    assert (step.commands, step.round_trips) == (2, 1)


def test_no_graph_no_step() -> None:
    reading: Request = request(C.GET_TENSOR, 1.0)
    assert steps(reading, answer(reading, 2.0), Undecoded(3.0, "")) == []
