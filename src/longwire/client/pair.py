"""Protocol 8's communicator: two devices of two servers, COMM_INIT and the rest.

Rank 0 listens on its port + 1000, rank 1 connects there, and what they say to each
other is llama.cpp's own (PROTOCOL.md, "Communicator"). One of the two at least is
llama.cpp's server; two of ours have links (`links.py`), which know more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from longwire.client.device import RemoteDevice
from longwire.client.links import NoLink, has_peer_port, refusable
from longwire.client.together import Post
from longwire.errors import RemoteError
from longwire.transport.endpoint import Endpoint
from longwire.transport.stream import connect
from longwire.wire import messages as m
from longwire.wire.constants import PEERS_ABOVE, Command

__all__ = ["Pair", "open_pair"]

_HOST_SIZE = 64
"""Of the field in COMM_INIT, its NUL included."""

_RELEASE_S = 2.0
"""For the connection that ends a rank 0's wait."""


class Pair:
    """Two ranks that have found each other."""

    def __init__(self, devices: Sequence[RemoteDevice]) -> None:
        self._devices: Sequence[RemoteDevice] = devices

    def posts(
        self, records: Sequence[bytes], absent: Sequence[bool]
    ) -> list[Post] | None:
        """What to post for one all-reduce; None where ggml has to do it."""
        if any(absent) or not self._devices:
            return None
        return [
            Post(
                device.connection,
                Command.COMM_ALLREDUCE,
                m.CommAllreduce(device.index, record).encode(),
            )
            for device, record in zip(self._devices, records, strict=True)
        ]

    def free(self) -> None:
        """Have both servers leave each other, once."""
        devices, self._devices = self._devices, ()
        for device in devices:
            # One that is gone has left already.
            with contextlib.suppress(RemoteError):
                device.connection.post(Command.COMM_FREE, m.U32.pack(device.index))
                device.connection.flush()


def open_pair(devices: Sequence[RemoteDevice]) -> Pair:
    """Have two servers find each other; the first device is rank 0.

    Raises:
        NoLink: they cannot; both connections go on.
        RemoteError: a connection failed.
    """
    if len(devices) != 2:
        raise NoLink("servers of llama.cpp sum in pairs only")
    first, second = devices
    _check(first, second)
    endpoint = first.endpoint
    host = endpoint.host.encode()
    port = endpoint.port + PEERS_ABOVE
    answers = [memoryview(bytearray(1)) for _ in devices]
    bodies = [
        m.CommInit(device.index, rank, 2, port, host if rank else b"").encode()
        for rank, device in enumerate(devices)
    ]
    try:
        # Neither answers before the other is at work.
        for rank in (1, 0):
            device = devices[rank]
            device.connection.begin(Command.COMM_INIT, bodies[rank], answers[rank])
        _join(second)
    except BaseException:
        # Whoever asks the other one next would have to wait for this.
        _release(Endpoint(endpoint.host, port))
        for device in (second, first):
            if device.connection.healthy:
                with contextlib.suppress(RemoteError):
                    _join(device)
        raise
    if not answers[1][0]:
        _release(Endpoint(endpoint.host, port))
    _join(first)
    for device, answer in zip(devices, answers, strict=True):
        if not answer[0]:
            raise NoLink(f"{device.endpoint} did not find the other (port {port})")
    return Pair(devices)


def _check(first: RemoteDevice, second: RemoteDevice) -> None:
    if first.endpoint == second.endpoint:
        raise NoLink(f"{first.endpoint} sums with another server only")
    for device in (first, second):
        dialect = device.connection.dialect
        if not dialect.has(Command.COMM_INIT):
            raise NoLink(f"{device.endpoint} speaks protocol {dialect.version}")
    if first.connection.server is not None and not has_peer_port(first.connection):
        raise NoLink(f"{first.endpoint} has no peer port")
    if len(first.endpoint.host.encode()) >= _HOST_SIZE:
        raise NoLink(f"the name of {first.endpoint} is too long")
    if first.endpoint.port + PEERS_ABOVE > 65535:
        raise NoLink(f"{first.endpoint} has no port {PEERS_ABOVE} above its own")


def _join(device: RemoteDevice) -> None:
    """Wait for the answer; a refusal is one, too."""
    with contextlib.suppress(NoLink), refusable(device.connection):
        device.connection.synchronize()


def _release(endpoint: Endpoint) -> None:
    """End the wait of a rank 0 whose rank 1 does not come: llama.cpp's has no limit."""
    with contextlib.suppress(OSError):
        connect(endpoint, _RELEASE_S).close()
