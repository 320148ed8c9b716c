"""What a remote device can do: asked once per kind, sizes by their order."""

from __future__ import annotations

from typing import Any

from longwire.client.records import NativeTensor
from longwire.client.support import OpSupport
from longwire.wire.constants import Command
from longwire.wire.lx import SupportsOps
from longwire.wire.tensors import TENSOR_SIZE, Tensor

TOP_K = 70
ADD = 2


class Server:
    """Answers like a device that does TOP_K up to 1,024 columns."""

    def __init__(self) -> None:
        self.asked: list[Tensor] = []

    def ask_sized(self, command: Command, body: bytes, limit: int) -> bytes:
        assert (command, limit) == (Command.LX_SUPPORTS_OPS, 1)
        (query,) = SupportsOps.decode(body).queries
        op = Tensor.decode(query[:TENSOR_SIZE])
        self.asked.append(op)
        return bytes([op.op != TOP_K or op.ne[0] <= 1024])

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


def support() -> tuple[OpSupport, Server]:
    server: Any = Server()
    return OpSupport(server, server, 0), server


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
