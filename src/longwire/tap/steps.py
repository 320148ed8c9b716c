"""Steps: what lies between a graph and the answers that it leads to.

A decode step is one per connection, and so is each ubatch of a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

from longwire.wire.constants import Command
from longwire.wire.trace import Answer, Event, Request

__all__ = ["GRAPHS", "READS", "Step", "StepCounter"]

GRAPHS = (Command.GRAPH_COMPUTE, Command.GRAPH_RECOMPUTE, Command.LX_GRAPH_PATCH)
"""What a step begins with."""

READS = (Command.GET_TENSOR, Command.GET_TENSOR_2D, Command.LX_TOP)
"""What a step ends with."""


@dataclass(slots=True)
class Step:
    """What one step cost on one connection.

    It counts from the last answer before its graph, so that the inputs are its
    own; its time is from the graph on.
    """

    begun_s: float = 0.0
    ended_s: float = 0.0
    graphs: int = 0
    commands: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    round_trips: int = 0
    """Waits for an answer; answers that are waited for together count once."""
    wait_s: float = 0.0

    @property
    def took_s(self) -> float:
        return self.ended_s - self.begun_s


class StepCounter:
    """Finds the steps in one connection's messages."""

    def __init__(self) -> None:
        self._step = Step()
        self._owed = 0
        self._since_s = 0.0
        """When the wait that is going on began."""

    def put(self, event: Event) -> Step | None:
        """The next message; a step, if that ended one."""
        if isinstance(event, Request):
            self._asked(event)
        elif isinstance(event, Answer):
            return self._answered(event)
        return None

    def _asked(self, request: Request) -> None:
        step = self._step
        step.commands += 1
        step.bytes_out += request.size
        if request.command in GRAPHS:
            if not step.graphs:
                step.begun_s = request.begun_s
            step.graphs += 1
        if request.answer is not None:
            if not self._owed:
                step.round_trips += 1
                self._since_s = request.ended_s
            self._owed += 1

    def _answered(self, answer: Answer) -> Step | None:
        step = self._step
        step.bytes_in += answer.size
        self._owed -= 1
        if self._owed:
            return None
        step.wait_s += answer.begun_s - self._since_s
        step.ended_s = answer.ended_s
        if not step.graphs:
            # What came before a question that is no part of a step is none either.
            self._step = Step()
            return None
        if answer.request.command not in READS:
            return None
        self._step = Step()
        return step
