"""What tells a healthy server from a sick one: its log, its processes, its answers."""

from __future__ import annotations

import json
import os
import re
import threading
import urllib.request
from collections import Counter, deque
from pathlib import Path
from typing import IO, NamedTuple

from longwire.transport.endpoint import Endpoint
from longwire.wire.dialects import DIALECTS
from support.client import RawClient
from support.tensors import Sum
from support.worker import PROC, resident

__all__ = ["Figures", "Finding", "LogWatch", "figures", "good_client", "held_memory"]


class Finding(NamedTuple):
    """Something that no client may bring about."""

    address: str | None
    """Of the client whose doing it is, where that is known."""
    words: str
    seed: int | None = None
    """Of that client, where that is known instead."""


_PEER = r"(?P<peer>127\.[\d.]+)"
_BAD = re.compile(
    r"Traceback \(most recent|reports nonsense|took no client|cannot start"
    r"|Fatal Python error: (?!Aborted)"
)
_DIED = re.compile(rf"of {_PEER}:\d+ died: (?P<how>.*)|session \d+ died: .*")
_ABORTED = re.compile(rf"of {_PEER}:\d+: ggml aborted: (?P<words>.*)")
_ENDED = re.compile(
    r"'reason': [\"'](?P<reason>[^,:}]*:?[^,:}]*).*?'refused': (?P<kind>[^,]*),"
)
_GRAPHS = ("GRAPH_COMPUTE", "GRAPH_RECOMPUTE", "LX_GRAPH_PATCH")
_PATIENCE = ("SIGALRM",)
"""How the inline server ends a kernel that goes on for too long."""


class LogWatch:
    """Reads a server's log on a thread of its own, for as long as there is one."""

    def __init__(self, log: IO[bytes], kept: Path) -> None:
        """Keep the end of `log` in the file `kept` once it is over."""
        self.findings: deque[Finding] = deque()
        self.tally: Counter[str] = Counter()
        """How sessions ended, by kind."""
        self.aborts: Counter[str] = Counter()
        """ggml's last words: inside of a graph they are its right (PROTOCOL, 9)."""
        self._excused: set[str] = set()
        self._last: deque[str] = deque(maxlen=4000)
        self._log = log
        self._kept = kept
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def join(self) -> None:
        """Wait for the log's end, and close it."""
        self._thread.join()
        self._log.close()
        self._kept.write_text("".join(self._last))

    def _run(self) -> None:
        for raw in self._log:
            line = raw.decode(errors="replace")
            self._last.append(line)
            if line.startswith("{"):
                self._event(json.loads(line))
            elif " serves 127." not in line:
                self._line(line)

    def _event(self, event: dict[str, str]) -> None:
        """A line of the inline server."""
        peer = event.get("peer", "")
        if event["event"] == "aborted":
            self._abort(peer, event["words"], event["command"] in _GRAPHS)
        elif event["event"] == "died":
            self._death(peer, event["how"])

    def _line(self, line: str) -> None:
        """A line of `longwire serve`."""
        if found := _ENDED.search(line):
            kind = found["kind"].strip("'")
            self.tally[kind if kind != "None" else found["reason"]] += 1
        elif found := _ABORTED.search(line):
            self._abort(found["peer"], found["words"], True)
        elif found := _DIED.search(line):
            self._death(found["peer"] or "", found["how"] or line)
        elif _BAD.search(line):
            self.findings.append(Finding(None, line.strip()))

    def _abort(self, peer: str, words: str, excused: bool) -> None:
        self.aborts[re.sub(r"\d{3,}|0x\w+", "N", words)] += 1
        self._excused.add(peer)
        if not excused:
            self.findings.append(Finding(peer, f"aborted outside of a graph: {words}"))

    def _death(self, peer: str, how: str) -> None:
        self.tally[f"died: {how}"] += 1
        if how in _PATIENCE or (how == "SIGABRT" and peer in self._excused):
            self._excused.discard(peer)
            return
        self.findings.append(Finding(peer, f"died: {how}"))


class Figures(NamedTuple):
    """What a server's processes take."""

    processes: int
    first: int
    """Bytes of memory of the supervisor."""
    largest: int
    """The same of the largest of the others."""
    descriptors: int
    """Of the process that has most."""


def figures(pid: int) -> Figures:
    """Those of a process and its children, now.

    Raises:
        OSError: it is gone.
    """
    children = _children(pid)
    return Figures(
        processes=1 + len(children),
        first=resident(pid),
        largest=max(map(resident, children), default=0),
        descriptors=max(map(_descriptors, [pid, *children])),
    )


def _descriptors(pid: int) -> int:
    try:
        return len(os.listdir(PROC / str(pid) / "fd"))
    except OSError:
        return 0  # it has ended by now


def _children(pid: int) -> list[int]:
    text = (PROC / str(pid) / "task" / str(pid) / "children").read_text()
    return [int(child) for child in text.split()]


def good_client(endpoint: Endpoint, protocol: int) -> None:
    """Come, compute a sum, and go.

    Raises:
        AssertionError, OSError, EOFError: the server did not do it.
    """
    with RawClient(endpoint, DIALECTS[protocol]) as client:
        client.hello()
        Sum(client).check()


def held_memory(metrics_port: int) -> float:
    """Bytes that a server believes its clients to hold."""
    url = f"http://127.0.0.1:{metrics_port}/metrics"
    with urllib.request.urlopen(url, timeout=5) as page:
        text = page.read().decode()
    found = re.search(r"^longwire_memory_bytes (\S+)$", text, re.MULTILINE)
    assert found, text
    return float(found[1])
