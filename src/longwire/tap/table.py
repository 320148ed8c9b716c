"""What passes as a table, a row for each command; drawn in place on a terminal."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import astuple, dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from longwire.tap.steps import Step
from longwire.tap.views import Closed, Opened, Shown, Source
from longwire.wire.constants import Command
from longwire.wire.frames import command_name
from longwire.wire.trace import Answer, Request, Undecoded

__all__ = ["TableView"]

_EVERY_S = 0.25
"""How often it is drawn: as fast as one can read."""

_STEPS = 1000
"""How many of the last steps the line about them is made of."""

_NOTES = 5
"""How many of the last notes are shown."""


@dataclass(slots=True)
class _Row:
    count: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    answers: int = 0
    wait_s: float = 0.0
    refused: int = 0


class TableView:
    """A view that counts, and draws the counts."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rows: dict[int, _Row] = {}
        self._steps: deque[Step] = deque(maxlen=_STEPS)
        self._n_steps = 0
        self._opened = 0
        self._open: set[Source] = set()
        self._protocols: set[str] = set()
        self._notes: deque[str] = deque(maxlen=_NOTES)
        self._drawn_s = 0.0
        self._live: Live | None = None

    def show(self, source: Source, event: Shown) -> None:
        if isinstance(event, Request):
            row = self._row(event)
            row.count += 1
            row.bytes_out += event.size
        elif isinstance(event, Answer):
            self._answered(event)
        elif isinstance(event, Step):
            self._n_steps += 1
            self._steps.append(event)
        elif isinstance(event, Opened):
            self._opened += 1
            self._open.add(source)
        elif isinstance(event, Undecoded):
            self._notes.append(f"{source.peer}: not decoded: {event.reason}")
        else:
            self._closed(source, event)

    def flush(self) -> None:
        now_s = time.monotonic()
        if not self._console.is_terminal or now_s - self._drawn_s < _EVERY_S:
            return
        self._drawn_s = now_s
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(self._drawing(), refresh=True)

    def close(self, lost: int) -> None:
        if lost:
            self._notes.append(f"{lost} messages are missing")
        if self._live is None:
            self._console.print(self._table())
            for line in self._lines():
                self._console.print(Text(line), soft_wrap=True)
        else:
            self._live.update(self._drawing(), refresh=True)
            self._live.stop()

    def _row(self, request: Request) -> _Row:
        return self._rows.setdefault(request.command, _Row())

    def _answered(self, answer: Answer) -> None:
        row = self._row(answer.request)
        row.answers += 1
        row.bytes_in += answer.size
        row.wait_s += answer.wait_s
        row.refused += answer.refused
        if answer.refused:
            return
        if answer.request.command == Command.HELLO:
            self._protocols.add(str(answer.details["protocol"]))
        elif answer.request.command == Command.LX_START:
            self._protocols.add("LX")

    def _closed(self, source: Source, event: Closed) -> None:
        self._open.discard(source)
        if event.owed:
            owed = ", ".join(event.owed[:3])
            self._notes.append(f"{source.peer}: {event.reason}; no answer to {owed}")

    def _drawing(self) -> RenderableType:
        return Group(self._table(), *map(Text, self._lines()))

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("command")
        for heading in ("count", "out", "in", "waited", "each"):
            table.add_column(heading, justify="right")
        for number in sorted(self._rows):
            table.add_row(*_cells(number, self._rows[number]))
        table.add_row("", *_figures(_total(self._rows.values())), style="bold")
        return table

    def _lines(self) -> list[str]:
        return [self._about_connections(), *self._about_steps(), *self._notes]

    def _about_connections(self) -> str:
        protocols = ", ".join(sorted(self._protocols)) or "unknown"
        return (
            f"connections: {self._opened}, {len(self._open)} of them open; "
            f"protocol {protocols}"
        )

    def _about_steps(self) -> list[str]:
        if not self._steps:
            return []
        steps = self._steps
        commands = statistics.median(step.commands for step in steps)
        trips = statistics.median(step.round_trips for step in steps)
        bytes_out = _size(statistics.median(step.bytes_out for step in steps))
        bytes_in = _size(statistics.median(step.bytes_in for step in steps))
        wait = _time(statistics.median(step.wait_s for step in steps))
        took = _time(statistics.median(step.took_s for step in steps))
        return [
            f"steps: {self._n_steps}; the median one: {commands:g} commands, "
            f"{trips:g} round trips, {bytes_out} out, {bytes_in} in, "
            f"{wait} waiting of {took}"
        ]


def _total(rows: Iterable[_Row]) -> _Row:
    columns = zip(*map(astuple, rows), strict=True)
    return _Row(*map(sum, columns))


def _cells(number: int, row: _Row) -> list[str]:
    name = command_name(number)
    if row.refused:
        name += f" ({row.refused} refused)"
    return [name, *_figures(row)]


def _figures(row: _Row) -> list[str]:
    cells = [f"{row.count:,}", _size(row.bytes_out), _size(row.bytes_in)]
    if not row.answers:
        return [*cells, "", ""]
    return [*cells, _time(row.wait_s), _time(row.wait_s / row.answers)]


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.2f} GB"


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:,.2f} s"
