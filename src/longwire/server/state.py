"""Everything one client has on this server, and what it has done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from longwire.errors import BadRequest, LongwireError
from longwire.native.compute import ComputeDevice
from longwire.server.buffers import BufferTable, SessionBuffer
from longwire.server.cache import WeightCache
from longwire.server.communicator import Communicator
from longwire.server.doors import LinkTable
from longwire.server.graphs import GraphStore, StoredGraph
from longwire.server.keeper import Keeper
from longwire.server.overlays import Overlay
from longwire.server.pairs import Pair
from longwire.server.prepared import PreparedWrites
from longwire.server.spans import SpanRing
from longwire.server.store import DataStore
from longwire.server.tensors import TensorChecker
from longwire.transport.stream import Stream
from longwire.wire.dialects import Dialect
from longwire.wire.messages import Bytes
from longwire.wire.patches import Bases
from longwire.wire.spans import WAITING

__all__ = ["Handler", "Pieces", "Served", "SessionState"]

Pieces = list[Bytes] | None
"""An answer's body; None for a command that is never answered."""


@dataclass(slots=True)
class Served:
    """What a session did, for the log line at its end."""

    commands: int = 0
    graphs: int = 0
    graph_time_s: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    bytes_from_files: int = 0
    """Weights that did not travel."""
    refusals: int = 0
    """LX commands answered with an error."""

    def figures(self) -> dict[str, int | float]:
        """All of it, as plain numbers."""
        found = asdict(self)
        found["graph_time_s"] = round(self.graph_time_s, 6)
        return found


@dataclass(slots=True)
class SessionState:
    """Everything one client has on this server."""

    dialect: Dialect
    devices: list[ComputeDevice]
    n_threads: int
    cache: WeightCache | None
    stream: Stream
    tokens: Sequence[bytes] = field(default=(), repr=False)
    """A client has to prove that it knows one of these; none are needed if empty."""
    verify: bool = True
    models: Sequence[str] = ()
    """Folders of model files that weights may be taken from."""
    buffers: BufferTable = field(default_factory=BufferTable)
    links: LinkTable = field(default_factory=LinkTable)
    communicators: dict[int, Communicator] = field(default_factory=dict)
    """LX: by the client's number."""
    pairs: dict[int, Pair] = field(default_factory=dict)
    """Protocol 8's communicators, by device."""
    served: Served = field(default_factory=Served)
    latched: LongwireError | None = None
    """LX: why an earlier command without an answer was not done."""
    command: int = -1
    """The command being received or done; -1 between two messages."""
    refused: str | None = None
    """What kind of refusal ended the session, if one did."""
    running: bool = False
    """A device may still be at work on a graph."""
    nonces: tuple[bytes, bytes] | None = field(default=None, repr=False)
    """The client's and ours, while a proof is awaited."""
    proven: bool = False
    """The client has proven that it knows a token."""
    asks_by_hash: bool = False
    """The client asks for weights as C++ clients do."""
    tensors: TensorChecker = field(init=False)
    prepared: PreparedWrites = field(init=False)
    graphs: GraphStore = field(init=False)
    store: DataStore = field(init=False)
    keeper: Keeper | None = field(init=False, default=None)
    """Who fills the cache, where there is one."""
    bases: Bases[StoredGraph] = field(default_factory=Bases)
    """LX: graphs that a patch may start from."""
    spans: SpanRing | None = None
    """LX: what is done is recorded here, if the client wants that."""

    def __post_init__(self) -> None:
        self.tensors = TensorChecker(self.buffers)
        self.prepared = PreparedWrites(self.tensors)
        self.graphs = GraphStore(self.dialect)
        self.store = DataStore(self.models, self.cache)
        if self.cache is not None:
            self.keeper = Keeper(self.cache)
        self.buffers.folding = self._folding
        self.tensors.on_forget(self._forget_sums)

    @property
    def locked(self) -> bool:
        """Whether nothing but the handshake works yet."""
        return bool(self.tokens) and not self.proven

    @property
    def admitted(self) -> bool:
        """Whether the handshake is done."""
        return self.served.commands > 0 and not self.locked

    def device(self, index: int, command: str) -> ComputeDevice:
        """The device of that index.

        Raises:
            BadRequest: there are not so many.
        """
        if index >= len(self.devices):
            raise BadRequest(command, f"no device {index} of {len(self.devices)}")
        return self.devices[index]

    def memory(self, device: ComputeDevice) -> tuple[int, int]:
        """Free and total bytes of a device, as this client may see them."""
        free, total = device.memory()
        left, most = self.buffers.room()
        if most is not None:
            total = min(total, most)
        if left is not None:
            free = min(free, left)
        return free, total

    def drain(self) -> None:
        """Wait until no device computes."""
        if self.running:
            spans = self.spans
            started_ns = time.monotonic_ns() if spans is not None else 0
            for device in self.devices:
                device.synchronize()
            self.running = False
            if spans is not None:
                spans.add(WAITING, started_ns)

    def _folding(self, buffer: SessionBuffer, overlay: Overlay) -> None:
        """Have nothing point into an overlay that is about to go."""
        self.drain()
        self.tensors.forget()
        self.graphs.move(overlay.memory, buffer.native, overlay.start)

    def _forget_sums(self) -> None:
        for communicator in self.communicators.values():
            communicator.forget()

    def break_links(self, reason: str) -> None:
        """Have all peers know at once that nothing more comes from here."""
        self.links.fail(reason)
        for pair in self.pairs.values():
            pair.close(reason)

    def finish(self) -> None:
        """Have all stored that is to be; nothing may be received any more."""
        if self.keeper is not None:
            self.keeper.close()

    def close(self) -> None:
        """Free everything; idempotent."""
        self.drain()
        self.finish()
        self.links.close()
        for pair in self.pairs.values():
            pair.close("the session ended")
        self.tensors.forget()
        self.buffers.close_all()
        self.store.close()
        for device in self.devices:
            device.close()


Handler = Callable[[SessionState, memoryview, int], Pieces]
