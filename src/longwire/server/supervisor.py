"""The supervisor: accepts, counts, and hands the raw socket on.

It never loads the engine and takes no byte of a client's. Each client that has
spoken gets a session process from a small pool of warm ones, so that whatever
happens in a session (an abort in ggml, a leak, an endless kernel) ends that one
client.

All of it is one loop over file descriptors: the listening socket, silent clients,
a control socket per session, and the pipe that signals wake.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from longwire.errors import UsageError
from longwire.server.access import Access, AllowList
from longwire.server.alarm import Alarm
from longwire.server.config import SessionConfig
from longwire.server.indexer import Indexer
from longwire.server.limits import Ledger, Limits
from longwire.server.lobby import Lobby
from longwire.server.metrics import Metrics
from longwire.server.notify import notify
from longwire.server.peers import Peers, listen_for_peers
from longwire.server.pool import Pool, Session, exit_text
from longwire.wire.constants import PEERS_ABOVE

__all__ = ["Supervisor"]

_log = logging.getLogger("longwire.serve")

_STARTING = 8
"""Sessions that start at the same time; more would only slow each other."""

_REAP_S = 0.05
"""How often a session that is about to end is looked at."""

_CROWD_S = 5.0
"""How long more spares than usual stay: visits come in rushes, and each new process
costs a third of a second."""

_NONSENSE = (
    ArithmeticError,
    AttributeError,
    KeyError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What reading a report can raise: JSON has infinite numbers, and may be deep."""

_RETRY_S = 1.0
"""Pause after the system refused a process or a descriptor."""


class Supervisor:
    """Serves until `stop` or `drain` is called, or SIGTERM or SIGINT arrives."""

    def __init__(
        self,
        host: str,
        port: int,
        config: SessionConfig,
        on_ready: Callable[[tuple[str, int], dict[str, Any]], None],
        limits: Limits | None = None,
        allow: AllowList | None = None,
        peer_port: int | None = None,
    ) -> None:
        """Bind `host:port` (port 0: any free one); `on_ready` gets the address
        and the first session's report once clients can be served.

        Other servers connect to `peer_port`: 1000 more than the port without, and
        nowhere with 0.

        Raises:
            OSError: the address cannot be bound.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=128)
        self._listener.setblocking(False)
        self.metrics = Metrics()
        self._limits = limits or Limits()
        self._ledger = Ledger(self._limits)
        self._on_ready: Callable[..., None] | None = on_ready
        self._selector = selectors.DefaultSelector()
        allow = allow or AllowList()
        self._alarm = Alarm()
        spare = peer_port is None and port == 0
        at = self.address[1] + PEERS_ABOVE if peer_port is None else peer_port
        self._peers = Peers(
            listen_for_peers(host, at, spare) if at else None,
            allow,
            self.metrics,
            self._selector,
            self._alarm.ring,
        )
        config = replace(config, peer_port=self._peers.port)
        self._pool = Pool(config, self._selector)
        self._indexer = Indexer(config, self._selector)
        self._lobby = Lobby(
            self._listener,
            self._limits,
            allow,
            self.metrics,
            self._selector,
        )
        self._config = config
        self._stopping = False
        self._drain_asked = False
        self._reload_asked = False
        self._drained_at: float | None = None
        """When clients have had their time to finish; None before a drain."""
        self._crowded = False
        """That clients wait for others to leave has been logged."""
        self._resume_at = 0.0
        self._failure: str | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that clients connect to."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    def run(self) -> None:
        """Serve; returns after a stop, with every session ended.

        Raises:
            UsageError: the first session could not start, and why.
        """
        self._alarm.take_signals(self.drain, self.stop, self.reload)
        self._selector.register(self._alarm.pipe, selectors.EVENT_READ)
        try:
            while not self._stopping:
                self._turn()
        finally:
            self._shut_down()
            self._alarm.give_signals_back()
            self._alarm.close()
        if self._failure is not None:
            raise UsageError(self._failure)

    def stop(self) -> None:
        """Ask `run` to return; safe from other threads and signal handlers."""
        self._stopping = True
        self._alarm.ring()

    def drain(self) -> None:
        """Ask `run` to take no new clients, and to return when the others have
        finished or had their time. A second call is a `stop`."""
        if self._drain_asked or not self._limits.drain_s:
            self._stopping = True
        self._drain_asked = True
        self._alarm.ring()

    def reload(self) -> None:
        """Ask for new sessions in place of the warm ones; clients are not disturbed."""
        self._reload_asked = True
        self._alarm.ring()

    def _turn(self) -> None:
        """Go once around the loop."""
        self._heed()
        self._fill_pool()
        self._lobby.listen(self._has_room())
        self._publish()
        for key, _ in self._selector.select(self._timeout()):
            self._dispatch(key.fileobj)
        self._lobby.expire()
        self._peers.tend()
        self._dismiss(self._pool.tired(self._limits.most_spares, _CROWD_S))
        self._reap()

    def _dispatch(self, ready: Any) -> None:
        if ready is self._alarm.pipe:
            self._alarm.hush()
        elif ready is self._listener:
            self._accept()
        elif ready in self._lobby:
            self._lobby.spoke(ready)
            self._assign()
        elif ready in self._peers:
            self._peers.spoke(ready)
        elif ready is self._indexer.pipe:
            self._indexer.reap()
        elif ready in self._pool.sessions:
            self._hear(self._pool.sessions[ready])

    def _publish(self) -> None:
        sessions = self._pool.sessions.values()
        serving, spare = self._pool.busy(), len(self._pool.ready())
        starting = sum(1 for s in sessions if not s.ready and not s.ended)
        leaving = len(self._pool) - serving - spare - starting
        self.metrics.set_state(
            {
                "serving": serving,
                "spare": spare,
                "starting": starting,
                "leaving": leaving,
            },
            self._ledger.total,
            self._drained_at is not None,
        )

    # What was asked for.

    def _heed(self) -> None:
        """Do what was asked for in a signal handler, or from another thread."""
        if self._reload_asked:
            self._reload_asked = False
            self._refresh()
        if self._drain_asked and self._drained_at is None:
            self._begin_drain()
        if self._drained_at is not None:
            busy = self._pool.busy()
            if not busy or time.monotonic() >= self._drained_at:
                self._stopping = True
                if busy:
                    _log.warning("%d clients did not finish in time", busy)

    def _refresh(self) -> None:
        try:
            Access.load(self._config.token_file, self._config.tls)
        except UsageError as error:
            # Sessions that could not read them would not even start.
            _log.error("SIGHUP: nothing is reloaded: %s", error)
            return
        _log.info("SIGHUP: %d warm sessions start anew", len(self._pool.spares()))
        for session in self._pool.sessions.values():
            session.stale = True
        config = self._config
        if config.token_file or config.tls or not self._limits.spares:
            # What they know of tokens and certificates holds no more; and without
            # spares no others would come to take their place.
            self._dismiss(self._pool.stale())
        if self._drained_at is None:
            self._indexer.start()

    def _dismiss(self, sessions: Sequence[Session]) -> None:
        for session in sessions:
            session.dismiss()

    def _begin_drain(self) -> None:
        notify("STOPPING=1")
        self._indexer.stop()
        self._drained_at = time.monotonic() + self._limits.drain_s
        waiting = self._lobby.close()
        for _ in range(waiting):
            self.metrics.refused("draining")
        self._dismiss([*self._pool.spares(), *self._pool.stale()])
        if waiting or self._pool.busy():
            _log.info(
                "draining: %d clients have %g s to finish, %d in line are closed",
                self._pool.busy(),
                self._limits.drain_s,
                waiting,
            )

    # The pool.

    def _fill_pool(self) -> None:
        if self._drained_at is not None:
            return
        spares = self._limits.spares
        # One is needed to see whether the engine can be loaded at all.
        wanted = max(spares, self._on_ready is not None)
        wanted += len(self._lobby.line) - len(self._pool.spares())
        room = self._limits.clients + max(1, spares) - len(self._pool)
        # Those from before a reload leave as soon as others have come.
        room += len(self._pool.stale())
        for _ in range(min(wanted, room, _STARTING - self._pool.starting())):
            if time.monotonic() < self._resume_at:
                return
            try:
                self._pool.spawn()
            except OSError as error:
                self._failed(f"cannot start a session: {error}")

    def _timeout(self) -> float | None:
        """Seconds until something is due that no descriptor announces."""
        due = []
        if self._pool.leaving:
            due.append(time.monotonic() + _REAP_S)
        if self._resume_at > time.monotonic():
            due.append(self._resume_at)
        if self._drained_at is not None:
            due.append(self._drained_at)
        if len(self._pool.spares()) > self._limits.most_spares:
            due.append(time.monotonic() + _CROWD_S)
        deadlines = self._lobby.deadline, self._peers.deadline
        due += [deadline for deadline in deadlines if deadline is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    # Clients.

    def _has_room(self) -> bool:
        if self._drained_at is not None or self._on_ready is not None:
            return False
        if time.monotonic() < self._resume_at:
            return False
        return self._lobby.has_room

    def _accept(self) -> None:
        try:
            self._lobby.accept()
        except OSError as error:
            # Without a pause, a lack of descriptors would keep this loop spinning.
            _log.warning("accept: %s", error)
            self._resume_at = time.monotonic() + _RETRY_S

    def _assign(self) -> None:
        """Give those in line a session each, as far as there are any."""
        line, idle = self._lobby.line, deque(self._pool.ready())
        places = self._limits.clients - self._pool.busy()
        while line and idle and places > 0:
            session, guest = idle.popleft(), line[0]
            try:
                session.serve(guest.socket, guest.peer, guest.hello_s)
            except OSError as error:
                _log.warning("%s took no client: %s", session, error)
                session.ended = True
                session.process.kill()
                continue
            line.popleft()
            guest.socket.close()
            places -= 1
            self.metrics.client()
            pid = session.process.pid
            _log.info(
                "session %d (pid %d) serves %s",
                session.number,
                pid,
                guest.peer,
                extra={**session.fields, "session_pid": pid},
            )
        if line and places <= 0 and not self._crowded:
            _log.warning(
                "all %d places are taken, clients wait in line", self._limits.clients
            )
        self._crowded = bool(line) and (places <= 0 or self._crowded)

    # Reports.

    def _hear(self, session: Session) -> None:
        try:
            reports = session.hear()
            if reports is None:
                self._bury(session)
                return
            for report in reports:
                self._report(session, report)
        except _NONSENSE:
            # Whatever overwrote its memory, nothing it says can be relied on.
            _log.error("%s reports nonsense, killed", session, extra=session.fields)
            session.process.kill()

    def _report(self, session: Session, report: dict[str, Any]) -> None:
        event = report.pop("event")
        if event == "claim":
            refusal = self._ledger.claim(session, int(report["size"]))
            if refusal is not None:
                self.metrics.refused("memory")
            session.answer(refusal=refusal)
        elif event == "release":
            self._ledger.release(session, int(report["size"]))
        elif event == "room":
            left, most = self._ledger.room(session)
            session.answer(left=left, most=most)
        elif self._peers.ask(session, event, report):
            pass
        elif event == "figures":
            self._count(session, report)
        elif event == "ready":
            session.ready = True
            session.idle_since = time.monotonic()
            if not session.stale:
                self._dismiss(self._pool.stale())
            if self._on_ready is not None and self._drained_at is None:
                announce, self._on_ready = self._on_ready, None
                for gap in report["gaps"]:
                    _log.warning("sessions are not fully confined: %s", gap)
                report["peer_port"] = self._peers.port
                announce(self.address, report)
                notify("READY=1")
                # Now, and not before: clients are not to wait for it.
                self._indexer.start()
            self._assign()
        elif event == "failed":
            session.ended = True
            self._failed(report["reason"])
        elif event == "aborted":
            _log.error(
                "%s: ggml aborted: %s",
                session,
                report["reason"],
                extra={**session.fields, "reason": report["reason"]},
            )
        else:
            self._client_left(session, report, again=event == "idle")

    def _client_left(
        self, session: Session, report: dict[str, Any], again: bool
    ) -> None:
        refused = report["refused"]
        if refused is not None:
            self.metrics.refused(refused)
        self._count(session, report)
        self._peers.forget(session)
        level = logging.WARNING if refused else logging.INFO
        _log.log(level, "%s: %s", session, report, extra={**session.fields, **report})
        session.peer = None
        session.ended = not again
        session.idle_since = time.monotonic()
        if again and (session.stale or self._drained_at is not None):
            session.dismiss()
        self._assign()

    def _count(self, session: Session, report: dict[str, Any]) -> None:
        self.metrics.served(session.counted, report)
        session.counted = report

    def _failed(self, reason: str) -> None:
        """A session could not start: the end for the first one, else bad luck."""
        self._resume_at = time.monotonic() + _RETRY_S
        if self._on_ready is None:
            _log.error("%s", reason)
        elif not self._stopping:
            self._failure = reason
            self._stopping = True

    # The end.

    def _bury(self, session: Session) -> None:
        self._ledger.drop(session)
        self._peers.forget(session)
        self._pool.bury(session)

    def _reap(self) -> None:
        for session, status in self._pool.reap():
            died = f"{session} died: {exit_text(status)}"
            if session.ready:
                _log.error("%s", died, extra=session.fields)
            elif self._drained_at is None:
                self._failed(f"{died} at its start")

    def _shut_down(self) -> None:
        if self._drained_at is None:
            notify("STOPPING=1")
        self._lobby.close()
        self._peers.close()
        self._indexer.stop()
        self._pool.close()
        self._selector.close()
