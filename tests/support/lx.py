"""A client that speaks LX."""

from __future__ import annotations

import numpy as np

from longwire.wire import messages as m
from longwire.wire.constants import LX_VERSION, Command
from longwire.wire.frames import ANSWER_HEADER
from longwire.wire.graphs import Graph
from longwire.wire.lx import ERROR_BIT, KEEP_ALIVE, ErrorAnswer, LxStart
from longwire.wire.tensors import WIDE_TENSOR, Tensor
from longwire.wire.types import nbytes
from support.client import RawClient

__all__ = ["WideClient", "wide_graph"]


class WideClient(RawClient):
    """A client that can start LX, and then sends wide records."""

    wide = False

    def start(self) -> None:
        """Speak LX from now on."""
        self.ask(Command.LX_START, LxStart(LX_VERSION).encode())
        self.dialect = self.dialect.with_lx()
        self.wide = True

    def answer(self) -> bytes:
        return self._receive(self._length())

    def error(self) -> str:
        """Read the next answer, which is an error's."""
        size = self._length()
        assert size & ERROR_BIT, size
        return ErrorAnswer.decode(self._receive(size ^ ERROR_BIT)).sentence

    def _length(self) -> int:
        size = KEEP_ALIVE
        while size == KEEP_ALIVE:
            (size,) = ANSWER_HEADER.unpack(self._receive(ANSWER_HEADER.size))
        return size

    def write(self, tensor: Tensor, data: m.Bytes, offset: int = 0) -> None:
        head = m.SetTensor(tensor.encode(self.wide), 0, offset).encode()
        self.post(Command.SET_TENSOR, [head, data])

    def read(self, tensor: Tensor, offset: int = 0, size: int | None = None) -> bytes:
        if size is None:
            size = nbytes(tensor.type, tensor.ne, tensor.nb) - offset
        body = m.GetTensor(tensor.encode(self.wide), offset, size).encode()
        return self.ask(Command.GET_TENSOR, body)


def wide_graph(node: Tensor, *sources: Tensor) -> Graph:
    """The graph of one node, in records of LX."""
    records = b"".join(t.encode(wide=True) for t in (*sources, node))
    ids = np.array([node.id], np.uint64)
    return Graph(0, 7, ids, np.frombuffer(records, WIDE_TENSOR))
