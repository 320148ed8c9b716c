"""A child process that confines itself, and tries what it should not be able to.

One child answers many tests: what came of its attempts is one line of JSON.
"""

from __future__ import annotations

import ctypes as C
import errno
import faulthandler
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longwire.native import kernel, landlock
from longwire.native.compute import select_devices
from longwire.native.engine import load_engine
from longwire.native.profiles import DEFAULT_ENGINE
from longwire.native.sandbox import confine
from support.ggml import f32, open_ggml

__all__ = ["DONE", "ask", "child"]

DONE = "done"
"""What came of an attempt that worked; else it is the name of an error."""

Attempts = dict[str, Callable[[], Any]]

_TESTS = Path(__file__).parents[1]
_NO_NEW_PRIVS, _GET_DUMPABLE = 38, 3
_CREATE_RULESET = 444


def child(function: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a process that calls one of the functions below."""
    path = os.pathsep.join([str(_TESTS), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", "support.confined", function, *arguments],
        # Else numpy starts threads, as many as there are cores.
        env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ask(function: str, *arguments: str) -> Any:
    """What one of the functions below returns in a process of its own."""
    with child(function, *arguments) as process:
        answer, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return json.loads(answer)


# What a child does.


def attempt_all(inside: str, outside: str, library: str) -> dict[str, Any]:
    """Confine this process, twice, and report what it can still do."""
    load_engine(DEFAULT_ENGINE)
    done = threading.Event()
    older = threading.Thread(target=done.wait, args=[60])
    older.start()
    first, second = (confine([Path(inside)])._asdict() for _ in range(2))
    facts = _facts()
    done.set()
    older.join()
    attempts = {
        **{f"inside: {name}": f for name, f in _changes(Path(inside)).items()},
        **{f"outside: {name}": f for name, f in _changes(Path(outside)).items()},
        **_programs(),
        **_others(),
        **_network(),
        **_needs(library),
    }
    outcomes = {name: _outcome(attempt) for name, attempt in attempts.items()}
    return {"first": first, "second": second, "facts": facts, **outcomes}


def without_landlock(outside: str) -> dict[str, Any]:
    """The same where the kernel has no Landlock, in short."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    def syscall(number: int, *arguments: int | bytes) -> int:
        if number == _CREATE_RULESET:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        return kernel.syscall(number, *arguments)

    logging.basicConfig(handlers=[Lines()], level=logging.INFO)
    confinement = confine([], syscall)._asdict()
    attempts = {**_changes(Path(outside)), **_programs(), **_others()}
    outcomes = {name: _outcome(attempt) for name, attempt in attempts.items()}
    return {**confinement, "lines": lines, "facts": _facts(), **outcomes}


def landlock_alone(abstract_name: str) -> dict[str, Any]:
    """What Landlock keeps this process from where there is nothing else."""

    def connect() -> None:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect("\0" + abstract_name)

    kernel.prctl(_NO_NEW_PRIVS, 1)
    return {
        "gaps": landlock.restrict([], []),
        "signal": _outcome(lambda: os.kill(os.getppid(), 0)),
        "connect": _outcome(connect),
    }


def end(how: str) -> None:
    """Confine this process, say that it is done, and end when told to."""
    faulthandler.enable()
    load_engine(DEFAULT_ENGINE)
    confine([])
    print(DONE, flush=True)
    sys.stdin.readline()
    {"abort": os.abort, "exit": lambda: os._exit(7), "wait": signal.pause}[how]()


def _outcome(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except OSError as error:
        return errno.errorcode[error.errno] if error.errno else str(error)
    return DONE


def _facts() -> dict[str, Any]:
    status = Path("/proc/self/status").read_text()
    threads = [path.read_text() for path in Path("/proc/self/task").glob("*/status")]
    return {
        "cores": resource.getrlimit(resource.RLIMIT_CORE),
        "dumpable": kernel.prctl(_GET_DUMPABLE, 0),
        "capabilities": int(_field(status, "CapEff"), 16),
        "no_new_privs": [_field(thread, "NoNewPrivs") for thread in threads],
        "seccomp": [_field(thread, "Seccomp") for thread in threads],
    }


def _field(status: str, name: str) -> str:
    return status.partition(f"\n{name}:")[2].split()[0]


def _changes(folder: Path) -> Attempts:
    """Ways to change a folder that holds `kept`, `spare` and the folder `empty`."""
    kept = folder / "kept"
    return {
        "create": lambda: (folder / "new").touch(),
        "make a folder": lambda: (folder / "folder").mkdir(),
        "append": lambda: kept.open("a").close(),
        "truncate": lambda: os.truncate(kept, 0),
        "replace": lambda: os.replace(folder / "spare", kept),
        "read": kept.read_text,
        "remove": kept.unlink,
        "remove a folder": (folder / "empty").rmdir,
        "link": lambda: (folder / "link").symlink_to("/etc"),
    }


def _programs() -> Attempts:
    return {
        "fork": os.fork,
        "exec": lambda: os.execv(sys.executable, [sys.executable, "-V"]),
        "spawn": lambda: os.posix_spawn(sys.executable, [sys.executable, "-V"], {}),
        "subprocess": lambda: subprocess.run([sys.executable, "-V"], check=True),
    }


def _others() -> Attempts:
    parent = os.getppid()
    return {
        "signal the parent": lambda: os.kill(parent, 0),
        "signal the group": lambda: os.kill(0, 0),
        "limit the parent": lambda: resource.prlimit(parent, resource.RLIMIT_CPU),
    }


def _network() -> Attempts:
    return {
        "listen": lambda: socket.create_server(("127.0.0.1", 0)).close(),
        # Nobody listens there, but that is not what comes first.
        "call out": lambda: socket.create_connection(("127.0.0.1", 9), 10).close(),
    }


def _needs(library: str) -> Attempts:
    return {
        "load a library": lambda: C.CDLL(library),
        "start a thread": _thread,
        "compute": _compute,
        "signal itself": _signal_itself,
        "limit itself": lambda: resource.prlimit(0, resource.RLIMIT_CPU),
        "read its maps": Path("/proc/self/maps").read_text,
        "list its files": lambda: os.listdir("/proc/self/fd"),
        "write /dev/null": lambda: Path("/dev/null").write_text("x"),
        "use /dev/shm": lambda: _scratch(Path("/dev/shm")),
        "use /tmp": lambda: _scratch(Path("/tmp")),
    }


def _thread() -> None:
    ran: list[bool] = []
    thread = threading.Thread(target=ran.append, args=[True])
    thread.start()
    thread.join(10)
    assert ran


def _compute() -> None:
    """An ADD on more threads than there are so far."""
    ggml = open_ggml(DEFAULT_ENGINE)
    (device,) = select_devices(ggml.engine, ["CPU"])
    device.open(8)
    a, out = f32(range(1 << 14)), f32([0] * (1 << 14))
    with ggml.context() as context, ggml.cpu_buffer(1 << 18) as buffer:
        left = ggml.tensor(context, a.size)
        total = ggml.library.ggml_add(context, left, left)
        graph = ggml.graph(context, total)
        ggml.place(buffer, left, total)
        ggml.library.ggml_backend_tensor_set(left, a.ctypes.data, 0, a.nbytes)
        assert device.compute(graph) == 0
        ggml.library.ggml_backend_tensor_get(total, out.ctypes.data, 0, a.nbytes)
    device.close()
    assert (out == a + a).all()


def _signal_itself() -> None:
    got: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    os.kill(os.getpid(), signal.SIGUSR1)
    signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
    assert len(got) == 2


def _scratch(folder: Path) -> None:
    file = folder / f"longwire-test-{os.getpid()}"
    file.touch()
    file.unlink()


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
