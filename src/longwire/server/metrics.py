"""What a server has done and holds, for Prometheus, and whether it is healthy.

The supervisor counts; a thread of its own serves the page, so that a slow reader
keeps nobody waiting.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

__all__ = ["Metrics", "MetricsPage", "REFUSALS"]

_log = logging.getLogger("longwire.serve")

REFUSALS = (
    "address",
    "silent",
    "handshake",
    "tls",
    "authentication",
    "idle",
    "stalled",
    "grace",
    "protocol",
    "command",
    "memory",
    "draining",
    "peer",
)
"""Each reason has its line from the start, so that a first refusal is seen to rise."""

_STATES = ("starting", "spare", "serving", "leaving")


class Metrics:
    """All figures of one server; `page` and `health` may be read by any thread."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._sessions = Gauge(
            "longwire_sessions", "Session processes.", ["state"], registry=registry
        )
        self._memory = Gauge(
            "longwire_memory_bytes", "Memory that clients hold.", registry=registry
        )
        self._clients = self._counter("clients", "Clients that got a session.")
        self._refusals = self._counter(
            "refusals", "Clients and commands refused.", "reason"
        )
        self._links = self._counter("links", "Streams between sessions and peers.")
        bytes_ = self._counter("bytes", "Bytes of messages.", "direction")
        self._served = {
            "bytes_in": bytes_.labels("in"),
            "bytes_out": bytes_.labels("out"),
            "commands": self._counter("commands", "Commands done."),
            "graphs": self._counter("graphs", "Graphs started."),
            "graph_time_s": self._counter(
                "graph_seconds", "Time spent in starting, or computing, graphs."
            ),
            "cache_hits": self._counter("cache_hits", "Weights found on file."),
            "cache_misses": self._counter("cache_misses", "Weights not on file."),
            "refusals": self._refusals.labels("command"),
        }
        for reason in REFUSALS:
            self._refusals.labels(reason)
        self.health: dict[str, Any] = {}
        """Replaced, never changed."""
        self.set_state({}, 0, False)

    def client(self) -> None:
        """A client got a session."""
        self._clients.inc()

    def refused(self, reason: str) -> None:
        """A client or a command was refused."""
        if reason in REFUSALS:
            self._refusals.labels(reason).inc()

    def linked(self) -> None:
        """A session got a stream from or to another server."""
        self._links.inc()

    def served(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """Count what a session has done since its report `before`."""
        for name, counter in self._served.items():
            done = now.get(name, 0) - before.get(name, 0)
            if done > 0:
                counter.inc(done)

    def set_state(
        self, sessions: Mapping[str, int], memory: int, draining: bool
    ) -> None:
        """Say how many sessions are in which state, and what clients hold."""
        for state in _STATES:
            self._sessions.labels(state).set(sessions.get(state, 0))
        self._memory.set(memory)
        alive = sessions.get("spare", 0) + sessions.get("serving", 0)
        self.health = {
            "status": "draining" if draining else "ok" if alive else "starting",
            "spares": sessions.get("spare", 0),
            "clients": sessions.get("serving", 0),
        }

    def page(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"longwire_{name}", text, labels, registry=self._registry)


class MetricsPage:
    """`/metrics` and `/healthz` on a port of their own, until `close`."""

    def __init__(self, host: str, port: int, metrics: Metrics) -> None:
        """Bind `host:port` and serve.

        Raises:
            OSError: the address cannot be bound.
        """

        class Handler(_Handler):
            figures = metrics

        # Not HTTPServer: that looks its own name up in the DNS.
        class Server(ThreadingMixIn, TCPServer):
            address_family = _family(host)
            allow_reuse_address = True
            daemon_threads = True

        self._server = Server((host, port), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="metrics", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that a scraper connects to."""
        host, port = self._server.server_address[:2]
        return str(host), port

    def close(self) -> None:
        """Stop serving; idempotent."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    figures: Metrics
    timeout = 5.0
    """Seconds; a reader that says nothing goes."""

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._answer(200, CONTENT_TYPE_LATEST, self.figures.page())
        elif self.path == "/healthz":
            health = self.figures.health
            code = 200 if health["spares"] or health["clients"] else 503
            body = json.dumps(health).encode() + b"\n"
            self._answer(code, "application/json", body)
        else:
            self._answer(404, "text/plain", b"there are /metrics and /healthz\n")

    def _answer(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug("metrics: " + format, *args)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
