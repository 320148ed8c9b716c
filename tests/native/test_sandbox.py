"""Confined processes: what they cannot do any more, and what they still can."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import blake3
import pytest

from longwire.native import landlock, seccomp
from longwire.native.seccomp import CALLS, MACHINES, program
from support.confined import DONE, ask, child

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

LIBRARY = next(Path(blake3.__file__).parent.glob("blake3*.so"))
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
"""Kernel headers, wherever Debian has them."""


def landlock_abi() -> int:
    """0 where there is none."""
    if sys.platform != "linux":
        return 0
    try:
        return landlock.syscall(444, 0, 0, 1)
    except OSError:
        return 0


needs_landlock = pytest.mark.skipif(landlock_abi() < 1, reason="needs Landlock")


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder that is no temporary one to `confine`: some twins, and a library."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        for folder in (Path(name, twin) for twin in ("inside", "outside", "old")):
            (folder / "empty").mkdir(parents=True)
            (folder / "kept").touch()
            (folder / "spare").touch()
        shutil.copy(LIBRARY, Path(name, "library.so"))
        yield Path(name)


@pytest.fixture(scope="module")
def report(place: Path) -> Any:
    paths = (place / name for name in ("inside", "outside", "library.so"))
    return ask("attempt_all", *map(str, paths))


@pytest.fixture(scope="module")
def old_report(place: Path) -> Any:
    return ask("without_landlock", str(place / "old"))


class TestConfined:
    def test_all_that_this_system_has(self, report: Any) -> None:
        wanted = ["no new privileges", "no core dumps", "dropped capabilities"]
        wanted += ["landlock"] if landlock_abi() else []
        wanted += ["seccomp"] if os.uname().machine in MACHINES else []
        assert report["first"]["holds"] == wanted

    def test_twice(self, report: Any) -> None:
        assert report["second"]["holds"] == report["first"]["holds"]

    def test_no_cores_and_no_privileges(self, report: Any) -> None:
        facts = report["facts"]
        assert facts["cores"] == [0, 0]
        assert facts["dumpable"] == 0
        assert facts["capabilities"] & ~0x4002 == 0

    def test_threads_that_are_older(self, report: Any) -> None:
        assert len(report["facts"]["seccomp"]) > 1
        assert set(report["facts"]["no_new_privs"]) == {"1"}
        assert set(report["facts"]["seccomp"]) == {"2"}
        if landlock_abi() < 8:
            assert "older threads" in "".join(report["first"]["lacks"])

    @needs_landlock
    @pytest.mark.parametrize(
        "change",
        [
            "create",
            "make a folder",
            "append",
            pytest.param(
                "truncate",
                marks=pytest.mark.skipif(landlock_abi() < 3, reason="needs ABI 3"),
            ),
            "replace",
            "remove",
            "remove a folder",
            "link",
        ],
    )
    def test_files_elsewhere(self, report: Any, change: str) -> None:
        assert report[f"outside: {change}"] == "EACCES"
        if change != "link":
            assert report[f"inside: {change}"] == DONE

    @pytest.mark.skipif(landlock_abi() < 4, reason="needs ABI 4")
    @pytest.mark.parametrize("attempt", ["listen", "call out"])
    def test_the_network(self, report: Any, attempt: str) -> None:
        """What a session is handed is all it talks to."""
        assert report[attempt] == "EACCES"

    def test_reading(self, report: Any) -> None:
        assert report["inside: read"] == report["outside: read"] == DONE

    @pytest.mark.parametrize("attempt", ["fork", "exec", "spawn", "subprocess"])
    def test_programs(self, report: Any, attempt: str) -> None:
        assert report[attempt] == "EPERM"

    @pytest.mark.parametrize(
        "attempt", ["signal the parent", "signal the group", "limit the parent"]
    )
    def test_other_processes(self, report: Any, attempt: str) -> None:
        assert report[attempt] == "EPERM"

    @pytest.mark.parametrize(
        "need",
        [
            "load a library",
            "start a thread",
            "compute",
            "signal itself",
            "limit itself",
            "read its maps",
            "list its files",
            "write /dev/null",
            "use /dev/shm",
            "use /tmp",
        ],
    )
    def test_what_serving_needs(self, report: Any, need: str) -> None:
        assert report[need] == DONE


class TestEnds:
    @pytest.mark.parametrize(
        ("how", "sent", "status"),
        [
            ("abort", None, -signal.SIGABRT),
            ("exit", None, 7),
            ("wait", signal.SIGTERM, -signal.SIGTERM),
        ],
    )
    def test_as_before(
        self, how: str, sent: signal.Signals | None, status: int
    ) -> None:
        with child("end", how) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == f"{DONE}\n"
            if sent is not None:
                process.send_signal(sent)
            _, errors = process.communicate("\n", timeout=30)
        assert process.returncode == status
        assert ("Fatal Python error: Aborted" in errors) == (how == "abort")


class TestOldKernel:
    def test_one_line(self, old_report: Any) -> None:
        lack = f"landlock: {os.strerror(errno.ENOSYS)}"
        assert old_report["lacks"] == [lack]
        assert old_report["lines"] == [f"not confined by {lack}"]
        assert "landlock" not in old_report["holds"]

    def test_the_rest_holds(self, old_report: Any) -> None:
        assert old_report["facts"]["cores"] == [0, 0]
        assert old_report["exec"] == old_report["fork"] == "EPERM"
        assert old_report["signal the parent"] == "EPERM"

    def test_files_are_what_it_was_for(self, old_report: Any) -> None:
        assert old_report["create"] == DONE


class Kernel:
    """Has Landlock of a version, and notes what it is asked for."""

    def __init__(self, abi: int) -> None:
        self.abi = abi
        self.handled = self.ports = self.scopes = self.flags = 0
        self.rules: list[int] = []

    def __call__(self, number: int, *arguments: int | bytes) -> int:
        match number, arguments:
            case 444, (0, 0, 1):
                return self.abi
            case 444, (bytes(attributes), 24, 0):
                self.handled, self.ports, self.scopes = struct.unpack(
                    "=QQQ", attributes
                )
                return os.open("/dev/null", os.O_RDONLY)
            case 445, (int(), 1, bytes(rule), 0):
                rights, _ = struct.unpack("=Qi", rule)
                assert rights & ~self.handled == 0
                self.rules.append(rights)
                return 0
            case 446, (int(), int(flags)):
                self.flags = flags
                return 0
        raise AssertionError((number, arguments))


class TestLandlock:
    @pytest.mark.parametrize(
        ("abi", "bits", "scopes"),
        [(1, 13, 0), (2, 14, 0), (3, 15, 0), (4, 15, 0), (5, 16, 0), (6, 16, 3)],
    )
    def test_each_version(
        self, tmp_path: Path, abi: int, bits: int, scopes: int
    ) -> None:
        kernel = Kernel(abi)
        gaps = landlock.restrict([tmp_path], [Path("/dev/null")], kernel)
        reading = 0b1100
        assert kernel.handled == (1 << bits) - 1 - reading
        assert kernel.ports == (0b11 if abi >= 4 else 0)
        assert kernel.scopes == scopes
        assert kernel.flags == 0
        assert len(kernel.rules) == 2
        # Writing, truncation, control.
        assert kernel.rules[1] == kernel.handled & 0xC002
        unknown = sum(f"has ABI {abi}" in gap and "threads" not in gap for gap in gaps)
        assert unknown == (abi < 3) + (abi < 4) + (abi < 5) + (abi < 6)

    def test_all_threads_at_once(self, tmp_path: Path) -> None:
        kernel = Kernel(8)
        assert landlock.restrict([tmp_path], [], kernel) == []
        assert kernel.flags == 1 << 3

    def test_threads_that_are_older(self, tmp_path: Path) -> None:
        others = len(os.listdir("/proc/self/task")) - 1
        gaps = landlock.restrict([tmp_path], [], Kernel(7))
        assert gaps == [f"{others} older threads (has ABI 7, not 8)"][:others]

    def test_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        kernel = Kernel(8)
        missing = tmp_path / "missing"
        reason = os.strerror(errno.ENOENT)
        gaps = landlock.restrict([missing], [], kernel)
        assert gaps == [f"{missing} cannot be allowed: {reason}"]
        assert kernel.rules == []

    @pytest.mark.skipif(landlock_abi() < 6, reason="needs Landlock ABI 6")
    def test_nobody_outside_is_reached(self) -> None:
        name = f"longwire-test-{os.getpid()}"
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("\0" + name)
            server.listen()
            report = ask("landlock_alone", name)
        assert report["signal"] == report["connect"] == "EPERM"


ALLOW, EPERM, ENOSYS = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
PID = 4711


def verdict(machine: str, call: str | int, *arguments: int, arch: int = 0) -> int:
    """What the filter of that machine says, on the kernel's own small machine."""
    target = MACHINES[machine]
    number = CALLS[call][target.column] if isinstance(call, str) else call
    assert number is not None
    padded = (*arguments, *[0] * (6 - len(arguments)))
    data = struct.pack("=IIQ6Q", number, arch or target.audit_arch, 0, *padded)
    block, at, loaded = program(target, PID), 0, 0
    for _ in block:
        code, if_true, if_false, value = block[at]
        at += 1
        match code:
            case 0x20:
                (loaded,) = struct.unpack_from("=I", data, value)
            case 0x06:
                return value
            case _:
                tests = {0x15: loaded == value, 0x35: loaded >= value}
                tests[0x45] = loaded & value != 0
                at += if_true if tests[code] else if_false
    raise AssertionError("no verdict")


EXCEPTIONS = ("clone", "clone3", "ioctl", "seccomp", "prlimit64")
OWN = ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")


@pytest.mark.parametrize("machine", MACHINES)
class TestFilter:
    def test_refused(self, machine: str) -> None:
        column = MACHINES[machine].column
        for name, numbers in CALLS.items():
            if name not in (*EXCEPTIONS, *OWN) and numbers[column] is not None:
                assert verdict(machine, name) == EPERM, name

    def test_nothing_else_is(self, machine: str) -> None:
        known = {numbers[MACHINES[machine].column] for numbers in CALLS.values()}
        for number in set(range(500)) - known:
            assert verdict(machine, number) == ALLOW, number

    def test_threads_and_no_children(self, machine: str) -> None:
        # Flags of glibc's pthread_create and of fork.
        assert verdict(machine, "clone", 0x3D0F00) == ALLOW
        assert verdict(machine, "clone", 0x1200011) == EPERM
        assert verdict(machine, "clone3") == ENOSYS

    @pytest.mark.parametrize("call", OWN)
    def test_signals_to_itself(self, machine: str, call: str) -> None:
        assert verdict(machine, call, PID) == ALLOW
        for other in (0, 1, PID + 1, -PID % (1 << 64), -1 % (1 << 64)):
            assert verdict(machine, call, other) == EPERM

    def test_own_limits(self, machine: str) -> None:
        assert verdict(machine, "prlimit64", 0) == ALLOW
        assert verdict(machine, "prlimit64", PID) == ALLOW
        assert verdict(machine, "prlimit64", PID - 1) == EPERM

    def test_typing_into_a_terminal(self, machine: str) -> None:
        assert verdict(machine, "ioctl", 2, 0x5412) == EPERM
        assert verdict(machine, "ioctl", 2, 1 << 32 | 0x541C) == EPERM
        assert verdict(machine, "ioctl", 2, 0x541B) == ALLOW

    def test_another_processor(self, machine: str) -> None:
        assert verdict(machine, 0, arch=0x40000003) == EPERM

    def test_numbers(self, machine: str) -> None:
        if not HEADERS[machine].exists():
            pytest.skip("no kernel headers")
        pattern = r"#define __NR(?:3264)?_(\w+) (\d+)"
        numbers = dict(re.findall(pattern, HEADERS[machine].read_text()))
        ours = {n: c[MACHINES[machine].column] for n, c in CALLS.items()}
        for name, number in ours.items():
            # Generic headers older than a call do not have it.
            theirs = numbers.get(name)
            assert theirs is None or int(theirs) == number, name
        assert len(ours.keys() & numbers.keys()) > 40


class TestForbid:
    def test_x32(self) -> None:
        assert verdict("x86_64", 0x40000000) == EPERM

    def test_an_unknown_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        uname = os.uname_result(("Linux", "host", "6.1", "1", "riscv64"))
        monkeypatch.setattr(os, "uname", lambda: uname)
        with pytest.raises(OSError, match="no table of system calls for this riscv64"):
            seccomp.forbid(lambda *_: 0)

    @pytest.mark.skipif(os.uname().machine not in MACHINES, reason="no table")
    def test_a_thread_that_cannot_follow(self) -> None:
        with pytest.raises(OSError, match="thread 12 has a filter of its own"):
            seccomp.forbid(lambda *_: 12)
