"""One session process: a fresh interpreter that serves one client at a time.

Started by the supervisor with one end of a control socket. It loads the
engine, reports READY, and waits to be handed a client. A session that held no
memory when its client left is as good as new and reports IDLE; any other ends,
and with it everything it had.
"""

from __future__ import annotations

import faulthandler
import logging
import socket
import ssl
import struct
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from longwire.errors import LongwireError, Unauthenticated
from longwire.native.compute import ComputeDevice, select_devices
from longwire.native.engine import load_engine, on_abort
from longwire.native.sandbox import confine
from longwire.server.access import Access
from longwire.server.buffers import BufferTable
from longwire.server.cache import WeightCache
from longwire.server.config import SessionConfig
from longwire.server.control import Control
from longwire.server.doors import LinkTable
from longwire.server.handlers import HANDLERS, STREAMED
from longwire.server.keeper import LOADING
from longwire.server.logs import context, log_to_stderr
from longwire.server.lx import error_answer
from longwire.server.rewrites import HEAD
from longwire.server.state import Pieces, Served, SessionState
from longwire.server.watch import Watch
from longwire.transport.stream import tune
from longwire.transport.tls import explain
from longwire.wire.constants import Command
from longwire.wire.dialects import DIALECTS, LX_OFFER, Shape
from longwire.wire.frames import (
    ANSWER_HEADER,
    REQUEST_HEADER,
    ServerOrder,
    command_name,
)
from longwire.wire.lx import ERROR_BIT

__all__ = ["main", "serve_client"]

_log = logging.getLogger("longwire.session")

_FREEING = frozenset(
    (
        Command.FREE_BUFFER,
        Command.LX_UNLINK,
        Command.LX_COMM_FREE,
        Command.COMM_FREE,
    )
)
"""Done even after a command that was not: a client frees no more than once."""


def serve_client(state: SessionState) -> str:
    """Answer one client until it leaves or breaks a rule; returns the reason."""
    stream, served = state.stream, state.served
    order = ServerOrder(state.dialect.offering_lx(), locked=state.locked)
    trace = _log.isEnabledFor(logging.DEBUG)
    keeper, rewrites = state.keeper, state.tensors.rewrites
    try:
        while True:
            state.command = -1
            # Known messages skip all of the below, but not what it is there for.
            if not trace and state.latched is None and state.spans is None:
                target = rewrites.find(stream)
                if target is not None:
                    state.command = Command.SET_TENSOR
                    if state.running:
                        state.drain()
                    stream.take_into(target)
                    served.commands += 1
                    served.bytes_in += HEAD + len(target)
                    continue
            number, length = REQUEST_HEADER.unpack(stream.take(REQUEST_HEADER.size))
            state.command = number
            spans = state.spans
            started_ns = time.monotonic_ns() if spans is not None else 0
            shape = order.admit(number, length)
            if trace:
                _log.debug("%s, %d bytes", command_name(number), length)
            begun = stream.taken
            body = stream.take(STREAMED.get(number, length))
            if shape.drains and state.running:
                state.drain()
            if keeper is not None and keeper.pending and number not in LOADING:
                keeper.settle()
            flag, refusal = 0, None
            try:
                if state.latched is not None and number not in _FREEING:
                    # Raised over and over: each time would add to the traceback.
                    raise state.latched.with_traceback(None)
                answer = HANDLERS[number](state, body, length)
            except LongwireError as error:
                if not state.dialect.lx and number not in LX_OFFER:
                    raise
                stream.skip(begun + length - stream.taken)
                served.refusals += 1
                answer, flag = _refused(state, shape, error), ERROR_BIT
                refusal = error
            served.commands += 1
            served.bytes_in += REQUEST_HEADER.size + length
            size = 0
            if answer is not None:
                size = sum(map(len, answer))
                stream.send([ANSWER_HEADER.pack(flag | size), *answer])
                served.bytes_out += ANSWER_HEADER.size + size
            if spans is not None:
                spans.add(number, started_ns, length + size)
            if number in LX_OFFER:
                if isinstance(refusal, Unauthenticated):
                    raise refusal
                order.locked = state.locked
                if state.dialect.lx:
                    order.dialect = state.dialect
    except EOFError:
        if state.command == -1:
            return "the client left"
        return f"the client left in the middle of {command_name(state.command)}"
    except BlockingIOError:
        state.refused = "stalled"
        return f"the client does not take the answer of {command_name(state.command)}"
    except ssl.SSLError as error:
        state.refused = "tls"
        return f"TLS: {explain(error)}"
    except OSError as error:
        return f"the connection broke: {error}"
    except Unauthenticated as error:
        state.refused = "authentication"
        return f"refused: {error}"
    except LongwireError as error:
        state.refused = "protocol"
        return f"refused: {error}"


def _refused(state: SessionState, shape: Shape, error: LongwireError) -> Pieces:
    """LX: answer a command with its error, or keep that for the next answer.

    In between, commands without an answer are read and not done: they were
    sent in the belief that all before them had worked.
    """
    # The client forgets its own when it hears of this; what it has sent until then
    # is not done, or starts from a graph that is not there, and says so.
    # A device may still read those that run.
    state.drain()
    state.bases.clear()
    state.graphs.clear()
    if shape.answer is None:
        if state.latched is None:
            _log.warning("refused: %s", error)
            # What follows is not done either, and peers would wait for it.
            state.break_links(f"an earlier command failed: {error}")
            state.latched = error
        return None
    state.latched = None
    return [error_answer(error).encode()]


def main() -> int:
    """Entry point: `python -m longwire.server.session CONTROL_FD CONFIG`."""
    control = Control(int(sys.argv[1]))
    config = SessionConfig.decode(sys.argv[2])
    # That a sum is infinite is for the model to know. Once for the process: what sums
    # small messages has no time to say so.
    np.seterr(all="ignore")
    # After a crash in a kernel the log has the command that led there.
    faulthandler.enable()
    log_to_stderr(config.log_format, config.verbosity)
    try:
        access = Access.load(config.token_file, config.tls)
        engine = load_engine(config.engine)
        devices = select_devices(engine, config.devices)
    except LongwireError as error:
        control.report("failed", reason=str(error))
        return 1
    on_abort(engine, lambda words: control.report("aborted", reason=words))
    described = _describe(devices)
    gaps = ["--no-sandbox"]
    if config.sandbox:
        gaps = confine([Path(config.cache_dir)] if config.cache_dir else []).lacks
    control.report(
        "ready",
        engine=engine.profile.label,
        protocol=DIALECTS[config.protocol].version,
        devices=described,
        gaps=gaps,
    )
    while (handed := control.next_client()) is not None:
        client, facts = handed
        context.update(session=facts["session"], peer=facts["peer"])
        if not _serve(client, facts["hello_s"], devices, access, config, control):
            return 0
        context.clear()
    return 0


def _describe(devices: list[ComputeDevice]) -> list[dict[str, Any]]:
    described = []
    for device in devices:
        free, total = device.memory()
        described.append(
            {
                "name": device.name,
                "description": device.description,
                "free": free,
                "total": total,
            }
        )
    return described


def _serve(
    client: socket.socket,
    hello_s: float,
    devices: list[ComputeDevice],
    access: Access,
    config: SessionConfig,
    control: Control,
) -> bool:
    """Serve one client; True when this process may take another."""
    started = time.monotonic()
    client.setblocking(True)
    tune(client)
    _bound_sends(client, config.stall_timeout_s)
    try:
        stream = access.stream(client)
    except OSError as error:
        reason = f"the connection broke: {error}"
        control.report("idle", reason=reason, refused=None, **Served().figures())
        client.close()
        return True
    stream.be_eager()
    cache = (
        WeightCache(Path(config.cache_dir), config.cache_limit)
        if config.cache_dir
        else None
    )
    state = SessionState(
        dialect=DIALECTS[config.protocol],
        devices=devices,
        n_threads=config.n_threads,
        cache=cache,
        stream=stream,
        tokens=access.tokens,
        verify=config.verify,
        models=config.models,
        buffers=BufferTable(control),
        links=LinkTable(control, config.peer_port, access.links),
    )
    with Watch(state, control, config, hello_s) as watch:
        reason = serve_client(state)
        # Under watch: a disk that hangs must not keep the session.
        state.finish()
    refused = state.refused
    if watch.verdict is not None:
        refused, reason = watch.verdict
    # With a question open it hears of no other client.
    used = state.buffers.opened > 0 or control.forsaken
    stream.close()
    state.close()
    control.report(
        "ended" if used else "idle",
        reason=reason,
        refused=refused,
        seconds=round(time.monotonic() - started, 3),
        **state.served.figures(),
    )
    return not used


def _bound_sends(client: socket.socket, stall_s: float) -> None:
    """Have a send fail with BlockingIOError when nothing leaves for so long."""
    whole, part = divmod(stall_s, 1)
    patience = struct.pack("@ll", int(whole), int(part * 1e6))
    client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)


if __name__ == "__main__":
    sys.exit(main())
