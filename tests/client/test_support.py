"""What a remote device can do: asked once per kind, sizes by their order."""

from __future__ import annotations

import itertools
from typing import Any

from longwire.client.records import NativeTensor
from longwire.client.support import OpSupport
from longwire.wire.constants import Command
from longwire.wire.lx import SupportsOps
from longwire.wire.tensors import TENSOR_SIZE, Tensor

TOP_K = 70
ADD = 2
GET_ROWS = 40


class Server:
    """Answers like a device that does TOP_K up to 1,024 columns."""

    def __init__(self) -> None:
        self.asked: list[Tensor] = []

    def ask_sized(self, command: Command, body: bytes, limit: int) -> bytes:
        assert command == Command.LX_SUPPORTS_OPS
        queries = SupportsOps.decode(body).queries
        assert limit == len(queries)
        ops = [Tensor.decode(query[:TENSOR_SIZE]) for query in queries]
        self.asked += ops
        return bytes([op.op != TOP_K or op.ne[0] <= 1024 for op in ops])

    def fit(self, tensor: NativeTensor) -> bool:
        return True

    def encode(self, tensor: NativeTensor) -> bytes:
        record = Tensor(1, tensor.type, 0, tensor.ne, tensor.nb, tensor.op)
        return record.encode(wide=True)


def tensor(op: int, *ne: int, kind: int = 0) -> NativeTensor:
    a, b, c, d = (*ne, 1, 1, 1, 1)[:4]
    nb = (4, 4 * a, 4 * a * b, 4 * a * b * c)
    return NativeTensor(
        *(1, kind, 0, (a, b, c, d), nb, op, bytes(64), 0, (), 0, 0, 0, b"")
    )


def ten(*sources: NativeTensor) -> list[NativeTensor | None]:
    return [*sources, *[None] * (10 - len(sources))]


engines = map(str, itertools.count())


def support(engine: str | None = None) -> tuple[OpSupport, Server]:
    """A device; those of an engine know what others of it were asked."""
    server: Any = Server()
    return OpSupport(server, server, 0, engine or next(engines)), server


def test_each_kind_is_asked_once() -> None:
    device, server = support()
    for _ in range(3):
        assert device.supports(tensor(ADD, 16), ten(tensor(0, 16), tensor(0, 16)))
    assert len(server.asked) == device.asked == 1
    device.supports(tensor(ADD, 16, kind=1), ten(tensor(0, 16), tensor(0, 16)))
    device.supports(tensor(ADD, 24), ten(tensor(0, 24), tensor(0, 24)))
    assert device.asked == 3


def test_a_yes_holds_for_smaller_ones() -> None:
    device, server = support()
    assert device.supports(tensor(ADD, 256, 4096), ten())
    for n in range(256, 4096, 256):
        # A cache that grows in steps of its alignment brings no new question.
        assert device.supports(tensor(ADD, 256, n), ten())
    assert device.asked == 1
    assert device.supports(tensor(ADD, 256, 8192), ten())
    assert device.asked == 2


def test_a_limit_is_found_and_kept() -> None:
    device, server = support()
    assert device.supports(tensor(TOP_K, 1024), ten())
    assert device.supports(tensor(TOP_K, 768), ten())
    assert not device.supports(tensor(TOP_K, 1280), ten())
    assert not device.supports(tensor(TOP_K, 2048), ten())
    assert device.asked == 2
    # Another alignment is another kind, with a limit of its own.
    assert not device.supports(tensor(TOP_K, 1025), ten())
    assert device.supports(tensor(TOP_K, 1023), ten())
    assert device.asked == 4


def test_wide_strides_are_a_kind_of_their_own() -> None:
    device, server = support()
    far = tensor(0, 16, 2)._replace(nb=(4, 1 << 32, 1 << 33, 1 << 33))
    assert device.supports(tensor(ADD, 16, 2), ten(far))
    assert device.supports(tensor(ADD, 16, 2), ten(far))
    assert device.asked == 1
    near = far._replace(nb=(4, 1 << 30, 1 << 31, 1 << 31))
    assert device.supports(tensor(ADD, 16, 2), ten(near))
    assert device.asked == 2


def test_layout_ops_are_never_asked_about() -> None:
    device, server = support()
    for op in (0, 36, 37, 38, 39):
        assert device.supports(tensor(op, 7), ten())
    assert server.asked == []


def test_the_next_device_is_asked_all_at_once() -> None:
    first, _ = support("shared")
    first.supports(tensor(ADD, 16), ten(tensor(0, 16)))
    first.supports(tensor(TOP_K, 512), ten())
    first.supports(tensor(TOP_K, 2048), ten())
    assert first.asked == 3
    second, server = support("shared")
    assert not second.supports(tensor(TOP_K, 2048), ten())
    assert second.supports(tensor(TOP_K, 512), ten())
    assert second.supports(tensor(ADD, 16), ten(tensor(0, 16)))
    assert second.asked == 1 and len(server.asked) == 3
    # A question that nobody has asked before is a message of its own.
    assert second.supports(tensor(ADD, 24), ten())
    assert second.asked == 2 and len(server.asked) == 4
    other, _ = support("another engine")
    other.supports(tensor(ADD, 16), ten(tensor(0, 16)))
    assert other.asked == 1


def test_a_growing_part_is_asked_about_at_once() -> None:
    """Its strides are those of the whole: another kind than the whole."""
    device, server = support()
    whole = (4, 4 * 64, 4 * 64 * 4096, 4 * 64 * 4096)

    def part(n: int) -> list[NativeTensor | None]:
        return ten(tensor(0, 64, n)._replace(nb=whole), tensor(0, 64))

    device.supports(tensor(ADD, 4096), part(4096))
    assert device.supports(tensor(ADD, 256), part(256))
    assert device.asked == 2
    for n in range(256, 4096, 256):
        assert device.supports(tensor(ADD, n), part(n))
    assert device.asked == 2


def test_what_is_empty_is_not_asked_about() -> None:
    """Nor would a device that cannot do the op have anything to do."""
    device, server = support()
    assert device.supports(tensor(TOP_K, 2048, 0), ten(tensor(0, 2048, 0)))
    assert not server.asked
    assert not device.supports(tensor(TOP_K, 2048), ten(tensor(0, 2048)))


def test_one_row_of_many_is_asked_along() -> None:
    """A prompt's last part has one row of logits: no question in the middle of it."""
    device, server = support()
    many = tensor(0, 640, 128)
    assert device.supports(tensor(GET_ROWS, 640, 128), ten(many, tensor(0, 128)))
    assert [op.ne for op in server.asked] == [(640, 128, 1, 1), (640, 1, 1, 1)]
    assert device.supports(tensor(GET_ROWS, 640, 1), ten(many, tensor(0, 1)))
    assert device.asked == 1
