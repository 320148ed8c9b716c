"""A seccomp filter: system calls that lead out of a process, and are refused.

It lists what is forbidden, not what is allowed: what a GPU driver calls is known
to nobody but the driver. It covers all threads, also those that exist already.
"""

from __future__ import annotations

import ctypes as C
import errno
import os
import struct
import sys
from collections.abc import Mapping
from typing import NamedTuple

from longwire.native.kernel import Syscall, syscall

__all__ = ["CALLS", "MACHINES", "Instruction", "forbid", "program"]


class Machine(NamedTuple):
    """What the filter has to know of a kind of processor."""

    column: int
    """In `CALLS`."""
    audit_arch: int
    foreign: int | None
    """Numbers from here on are of another ABI for the same processor."""


MACHINES = {
    "x86_64": Machine(0, 0xC000003E, 0x40000000),
    "aarch64": Machine(1, 0xC00000B7, None),
}

CALLS: Mapping[str, tuple[int | None, int | None]] = {
    # New programs and processes: a child would outlive its session.
    "execve": (59, 221),
    "execveat": (322, 281),
    "fork": (57, None),
    "vfork": (58, None),
    # Other processes of the same user.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "tkill": (200, 130),
    # Another view of the file system.
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "unshare": (272, 97),
    "setns": (308, 268),
    # The system as a whole.
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    # Parts of the kernel that many holes were found in.
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    # Looked at more closely, in `_exceptions`.
    "clone": (56, 220),
    "clone3": (435, 435),
    "kill": (62, 129),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "prlimit64": (302, 261),
    "ioctl": (16, 29),
    "seccomp": (317, 277),
}
"""Numbers by machine."""

_CLONE_THREAD = 0x10000
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C

_SET_FILTER = 1
_ALL_THREADS = 1 << 0
# Kernels before 5.16 would otherwise slow down every computation of a filtered
# process, against code in it that spies on its own process.
_KEEP_SPECULATION = 1 << 2


class Instruction(NamedTuple):
    """One `sock_filter`. Jumps are relative to the next instruction."""

    code: int
    if_true: int
    if_false: int
    value: int


Block = list[Instruction]

_LOAD, _EQUAL, _AT_LEAST, _HAS_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06

_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
"""Offsets in `seccomp_data`."""

_ALLOW: Block = [Instruction(_RETURN, 0, 0, 0x7FFF0000)]
_REFUSE: Block = [Instruction(_RETURN, 0, 0, 0x00050000 | errno.EPERM)]
# What a C library takes for an old kernel: it falls back to `clone`, whose flags
# lie in a register and not in memory, so that a filter can see them.
_LACK: Block = [Instruction(_RETURN, 0, 0, 0x00050000 | errno.ENOSYS)]


def _load(offset: int) -> Block:
    return [Instruction(_LOAD, 0, 0, offset)]


def _argument(index: int) -> Block:
    """The lower half: the kernel itself looks at no more of these."""
    return _load(_ARGUMENTS + 8 * index)


def _when(test: int, value: int, then: Block) -> Block:
    """`then` must end in a return."""
    return [Instruction(test, 0, len(then), value), *then]


def _exceptions(pid: int) -> dict[str, Block]:
    """What becomes of calls whose arguments matter."""
    own = [*_argument(0), *_when(_EQUAL, pid, _ALLOW), *_REFUSE]
    return {
        "clone": [
            *_argument(0),
            *_when(_HAS_BIT, _CLONE_THREAD, _ALLOW),
            *_REFUSE,
        ],
        "clone3": _LACK,
        "kill": own,
        "tgkill": own,
        "rt_sigqueueinfo": own,
        "rt_tgsigqueueinfo": own,
        # A limit on another's processor time ends it just as a signal does.
        "prlimit64": [*_argument(0), *_when(_EQUAL, 0, _ALLOW), *own[1:]],
        # These type into the terminal that the server was started from.
        "ioctl": [
            *_argument(1),
            *_when(_EQUAL, _TIOCSTI, _REFUSE),
            *_when(_EQUAL, _TIOCLINUX, _REFUSE),
            *_ALLOW,
        ],
        "seccomp": _ALLOW,
    }


def program(machine: Machine, pid: int) -> Block:
    """The filter for a process of that number."""
    is_ours = Instruction(_EQUAL, len(_REFUSE), 0, machine.audit_arch)
    block = [*_load(_ARCH), is_ours, *_REFUSE, *_load(_NUMBER)]
    if machine.foreign is not None:
        block += _when(_AT_LEAST, machine.foreign, _REFUSE)
    exceptions = _exceptions(pid)
    for name, numbers in CALLS.items():
        number = numbers[machine.column]
        if number is not None:
            block += _when(_EQUAL, number, exceptions.get(name, _REFUSE))
    return [*block, *_ALLOW]


class _Program(C.Structure):
    """`sock_fprog`."""

    _fields_ = [("length", C.c_ushort), ("instructions", C.c_char_p)]


def forbid(syscall: Syscall = syscall) -> list[str]:
    """Refuse those system calls to all threads of this process, for good.

    New threads, signals to itself and libraries go on working. Returns what is not
    covered here, in words.

    Raises:
        OSError: the kernel refuses, or we have no table for this machine.
    """
    name = os.uname().machine
    machine = MACHINES.get(name)
    if machine is None or sys.maxsize < 1 << 32:
        raise OSError(errno.ENOSYS, f"no table of system calls for this {name}")
    block = program(machine, os.getpid())
    raw = b"".join(struct.pack("=HBBI", *instruction) for instruction in block)
    pointer = bytes(_Program(len(block), raw))
    number = CALLS["seccomp"][machine.column]
    assert number is not None
    failed = syscall(number, _SET_FILTER, _ALL_THREADS | _KEEP_SPECULATION, pointer)
    if failed:
        raise OSError(errno.ESRCH, f"thread {failed} has a filter of its own")
    return []
