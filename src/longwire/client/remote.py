"""`connect`: endpoints to remote devices, one connection each."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from longwire.client.buffer import Session
from longwire.client.collectives import communicate
from longwire.client.connection import Connection
from longwire.client.credentials import Credentials
from longwire.client.device import RemoteDevice
from longwire.client.greeting import open_connection
from longwire.client.health import Deadlines
from longwire.errors import LongwireError, RemoteFailure, UsageError
from longwire.native.compute import op_names
from longwire.native.engine import NativeEngine, load_engine
from longwire.native.plugin import Registry
from longwire.native.profiles import DEFAULT_ENGINE
from longwire.transport.endpoint import Endpoint, parse_endpoints
from longwire.wire import messages as m
from longwire.wire.constants import Command
from longwire.wire.lx import LxDevice

__all__ = ["close", "connect", "release", "try_connect"]

_log = logging.getLogger("longwire.client")

_MAX_DEVICES = 64
"""Per endpoint; a server that claims more is not a server."""

_lock = threading.Lock()
_numbers = itertools.count()
_devices: dict[tuple[str, Endpoint], list[RemoteDevice]] = {}


def connect(
    endpoints: str | Iterable[Endpoint],
    *,
    engine: str = DEFAULT_ENGINE,
    deadlines: Deadlines | None = None,
    credentials: Credentials | None = None,
) -> list[RemoteDevice]:
    """Connect to endpoints ("host:port,...") and return all their devices.

    The devices are for `Engine(rpc=...)` of the same `engine`. An endpoint
    that is connected already is not connected again; one whose connection
    failed is, and its devices come back to life.

    Raises:
        EndpointError: the text names no endpoints.
        UsageError: one is connected already, with other credentials.
        ConnectionLost: an endpoint cannot be reached. All are tried at once, so
            dead ones cost one time-out together; the first is raised.
        AuthenticationFailed: an endpoint and this client do not accept each other.
        VersionMismatch: an endpoint speaks another protocol.
        NativeError: the engine cannot be loaded.
    """
    results = try_connect(
        endpoints, engine=engine, deadlines=deadlines, credentials=credentials
    )
    devices = [d for r in results.values() if isinstance(r, list) for d in r]
    for result in results.values():
        if isinstance(result, LongwireError):
            # A C++ server serves nobody else while it is connected.
            close(devices)
            raise result
    return devices


def try_connect(
    endpoints: str | Iterable[Endpoint],
    *,
    engine: str = DEFAULT_ENGINE,
    deadlines: Deadlines | None = None,
    credentials: Credentials | None = None,
) -> dict[Endpoint, list[RemoteDevice] | LongwireError]:
    """Like `connect`, but each endpoint's error stands in its place.

    Raises:
        EndpointError: the text names no endpoints.
        UsageError: one is connected already, with other credentials.
        NativeError: the engine cannot be loaded.
    """
    if isinstance(endpoints, str):
        endpoints = parse_endpoints(endpoints)
    wanted = list(dict.fromkeys(endpoints))
    native = load_engine(engine)
    with _lock:
        if credentials is not None:
            _check_credentials(engine, wanted, credentials)
        fresh = [e for e in wanted if not _is_connected(engine, e)]
        with ThreadPoolExecutor(max(1, len(fresh))) as pool:
            answers = pool.map(lambda e: _open(e, deadlines, credentials), fresh)
            opened = dict(zip(fresh, answers, strict=True))
        found = {e: _settle(native, engine, e, opened.get(e)) for e in wanted}
        for devices in found.values():
            if isinstance(devices, list):
                devices[0].connection.users += 1
        return found


def close(devices: Iterable[RemoteDevice]) -> None:
    """Leave the servers of these devices, once for each `connect` to them.

    A connection that somebody else has connected to as well stays open.
    """
    release(dict.fromkeys(device.connection for device in devices))


def release(connections: Iterable[Connection]) -> None:
    """`close` for those who may hold connections that were replaced since."""
    for connection in connections:
        with _lock:
            connection.users -= 1
            unused = connection.users <= 0
        if unused:
            connection.close()


def _check_credentials(
    engine: str, endpoints: Iterable[Endpoint], credentials: Credentials
) -> None:
    for endpoint in endpoints:
        if _is_connected(engine, endpoint):
            connection = _devices[engine, endpoint][0].connection
            if connection.credentials != credentials:
                raise UsageError(
                    f"{endpoint} is connected with other credentials; close that first"
                )


Opened = tuple[Connection, list[LxDevice | None]] | LongwireError


def _is_connected(engine: str, endpoint: Endpoint) -> bool:
    devices = _devices.get((engine, endpoint))
    return devices is not None and devices[0].connection.healthy


def _open(
    endpoint: Endpoint, deadlines: Deadlines | None, credentials: Credentials | None
) -> Opened:
    try:
        connection = open_connection(endpoint, deadlines, credentials)
        (count,) = m.U32.unpack(connection.ask(Command.DEVICE_COUNT, b""))
        if not 0 < count <= _MAX_DEVICES:
            connection.close()
            raise RemoteFailure(
                str(endpoint), "DEVICE_COUNT", f"offers {count} devices"
            )
        return connection, [_describe(connection, i) for i in range(count)]
    except LongwireError as error:
        return error


def _describe(connection: Connection, index: int) -> LxDevice | None:
    if connection.server is None:
        return None
    body = m.U32.pack(index)
    return connection.ask_message(Command.LX_DEVICE, body, LxDevice.decode)


def _settle(
    native: NativeEngine, engine: str, endpoint: Endpoint, opened: Opened | None
) -> list[RemoteDevice] | LongwireError:
    """Give an opened connection its devices. Called with the lock held."""
    known = _devices.get((engine, endpoint))
    if opened is None:
        assert known is not None
        return known
    if isinstance(opened, LongwireError):
        return opened
    connection, infos = opened
    count = len(infos)
    session = Session(connection, op_names(native))
    devices = list(known or ())[:count]
    # ggml never forgets a device: one that was here before gets its place back.
    for device, info in zip(devices, infos, strict=False):
        device.attach(session, info)
    registry = Registry(native, communicate) if len(devices) < count else None
    for index in range(len(devices), count):
        assert registry is not None
        name = f"RPC{next(_numbers)}"
        devices.append(RemoteDevice(registry, name, index, session, infos[index]))
    _devices[(engine, endpoint)] = devices
    _log.info(
        "%s: protocol %s, %d device(s)", endpoint, connection.dialect.version, count
    )
    return devices
