"""PROTOCOL.md's tables against the tables in code, so that neither drifts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import takewhile
from pathlib import Path

import pytest

from longwire.errors import WIRE_CODES
from longwire.wire import constants, types
from longwire.wire.constants import U64_MAX, Command
from longwire.wire.dialects import ANY, LX_OFFER, LX_SHAPES, V7, V8, Dialect, Shape
from longwire.wire.tensors import TENSOR

DOCUMENT = Path(__file__).parents[2] / "PROTOCOL.md"
WIDTHS = {"u8": 1, "u32": 4, "u64": 8, "i32": 4, "char": 1, "tensor": 296}

Row = list[str]


def table(*header: str) -> list[Row]:
    """The rows of the one table that has these headings."""
    lines = iter(DOCUMENT.read_text(encoding="utf-8").splitlines())
    for row in rows(lines):
        if row == list(header):
            body = list(takewhile(len, rows(lines)))
            return body[1:]
    raise AssertionError(f"PROTOCOL.md has no table headed {header}")


def rows(lines: Iterable[str]) -> Iterator[Row]:
    """The cells of each line; none for a line outside tables."""
    for line in lines:
        inside = line.startswith("|")
        yield [cell.strip() for cell in line[1:-1].split("|")] if inside else []


def command_rows() -> list[Row]:
    return table(
        "no.",
        "command",
        "7.0.0 request",
        "7.0.0 answer",
        "8.0.0 request",
        "8.0.0 answer",
        "drains",
    )


def request_sizes(cell: str) -> tuple[int, int]:
    """Least and most bytes, of `12`, `305 or more` or `8 to 80`."""
    if match := re.fullmatch(r"(\d+) or more", cell):
        return int(match[1]), U64_MAX
    if match := re.fullmatch(r"(\d+) to (\d+)", cell):
        return int(match[1]), int(match[2])
    return int(cell), int(cell)


def answer_size(cell: str) -> int | None:
    words = {"none": None, "as asked": ANY}
    return words[cell] if cell in words else int(cell)


def documented(request: int, answer: int) -> dict[int, Shape]:
    """One dialect's commands, from its two columns of the document."""
    return {
        int(row[0], 16): Shape(
            *request_sizes(row[request]),
            answer_size(row[answer]),
            {"yes": True, "no": False}[row[6]],
        )
        for row in command_rows()
        if row[request] != "–"
    }


@pytest.mark.parametrize(
    ("dialect", "request_column", "answer_column"),
    [(V7, 2, 3), (V8, 4, 5)],
    ids=["v7", "v8"],
)
def test_command_table(
    dialect: Dialect, request_column: int, answer_column: int
) -> None:
    assert documented(request_column, answer_column) == dialect.shapes


def test_command_names_and_numbers() -> None:
    listed = [(int(row[0], 16), row[1]) for row in [*command_rows(), *lx_rows()]]
    assert listed == [(command.value, command.name) for command in Command]


def lx_rows() -> list[list[str]]:
    return table("no.", "command", "request", "answer", "drains")


def test_lx_command_table() -> None:
    listed = {
        int(row[0], 16): Shape(
            *request_sizes(row[2]),
            answer_size(row[3]),
            {"yes": True, "no": False}[row[4]],
        )
        for row in lx_rows()
    }
    assert listed == {**LX_OFFER, **LX_SHAPES}


def test_lx_error_table() -> None:
    listed = {row[1]: int(row[0]) for row in table("code", "name", "when")}
    assert listed == WIRE_CODES


def test_a_command_that_is_absent_has_no_sizes_at_all() -> None:
    for row in command_rows():
        assert (row[2] == "–") is (row[3] == "–")
        assert (row[4] == "–") is (row[5] == "–")


def width(type_name: str) -> int:
    match = re.fullmatch(r"(\w+?)(?:\[(\d+)\])?", type_name)
    assert match, type_name
    return WIDTHS[match[1]] * int(match[2] or 1)


def body_size(fields: str) -> tuple[int, bool]:
    """Bytes of a documented body, and whether data follows them."""
    at = 0
    for field in fields.split(", "):
        offset, type_name, *name = field.split()
        assert int(offset) == at, fields
        if type_name == "data":
            return at, True
        assert len(name) == 1, fields
        at += width(type_name)
    return at, False


def messages(kind: str) -> Iterator[tuple[Dialect, str, str]]:
    """Dialect, command and fields of every row of one of the two body tables."""
    for names, fields in table(kind, "fields"):
        for name in names.split(", "):
            command, _, version = name.partition(" ")
            for dialect in (V7, V8):
                known = dialect.has(Command[command])
                if known and version in ("", dialect.version):
                    yield dialect, command, fields


def test_request_bodies_have_the_sizes_of_their_commands() -> None:
    seen = set()
    for dialect, command, fields in messages("request"):
        shape = dialect.shapes[Command[command]]
        size, data = body_size(fields)
        assert (size, data) == (shape.least, shape.most == U64_MAX), command
        seen.add((dialect.version, command))
    elsewhere = {Command.DEVICE_COUNT, Command.GRAPH_COMPUTE}
    assert seen == {
        (dialect.version, Command(number).name)
        for dialect in (V7, V8)
        for number in dialect.shapes
        if number not in elsewhere
    }


def test_answer_bodies_have_the_sizes_of_their_commands() -> None:
    seen = set()
    for dialect, command, fields in messages("answer"):
        assert body_size(fields) == (dialect.shapes[Command[command]].answer, False)
        seen.add((dialect.version, command))
    assert seen == {
        (dialect.version, Command(number).name)
        for dialect in (V7, V8)
        for number, shape in dialect.shapes.items()
        if shape.answer not in (None, ANY)
    }


def test_graph_table() -> None:
    listed = table("field", "7.0.0 offset", "8.0.0 offset", "size")
    for column, dialect in ((1, V7), (2, V8)):
        present = [row for row in listed if row[column] != "–"]
        last, size = present[-1][column], present[-1][3]
        most = value(last, constants.MAX_GRAPH_NODES)
        most += value(size, constants.MAX_GRAPH_TENSORS)
        shape = dialect.shapes[Command.GRAPH_COMPUTE]
        assert most == shape.most
        nodes = next(row for row in present if "node ids" in row[0])
        assert value(nodes[column], 0) == shape.least
        for above, below in zip(present, present[1:], strict=False):
            end = value(above[column], 1) + value(above[3], 1)
            assert end == value(below[column], 1)


def value(cell: str, count: int) -> int:
    """`12+8n` or `296m` with the letter replaced by `count`."""
    terms = cell.split("+")
    return sum(
        int(term[:-1]) * count if term[-1] in "nm" else int(term) for term in terms
    )


def test_tensor_record_table() -> None:
    listed = table("offset", "size", "type", "field", "content")
    assert TENSOR.fields is not None
    assert [(row[3], int(row[0]), int(row[1])) for row in listed] == [
        (name, entry[1], entry[0].itemsize) for name, entry in TENSOR.fields.items()
    ]
    for row in listed:
        assert width(row[2]) == int(row[1])


def test_type_table() -> None:
    listed = {}
    for cell in (cell for row in table("", "", "", "", "") for cell in row):
        match = re.fullmatch(r"(\d+) (\w+) (\d+)/(\d+)(q?)", cell)
        assert match, cell
        number, name, block, size, quantized = match.groups()
        listed[int(number)] = types.TypeTraits(
            name, int(block), int(size), bool(quantized)
        )
    assert listed == types.TYPES


def test_limits_table() -> None:
    known = {**vars(constants), "TYPE_COUNT": types.TYPE_COUNT}
    listed = table("limit", "value", "reason")
    assert len(listed) == 8
    for name, number, reason in listed:
        assert known[name] == int(number)
        assert reason
