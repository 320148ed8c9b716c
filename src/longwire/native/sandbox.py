"""`confine`: a process gives up what it does not need to compute for a stranger.

Whoever takes over a session through a hole in a kernel of the engine shall find
no way on: not to other files, programs, processes, or into the system.
"""

from __future__ import annotations

import glob
import logging
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from longwire.native import kernel, landlock, seccomp
from longwire.native.kernel import Syscall

__all__ = ["Confinement", "confine"]

_log = logging.getLogger("longwire.session")

_SET_DUMPABLE = 4
_SET_NO_NEW_PRIVS = 38

# The cache folder may be another user's, and DMA pins memory.
_KEPT_CAPABILITIES = 1 << 1 | 1 << 14
"""`CAP_DAC_OVERRIDE` and `CAP_IPC_LOCK`."""

_DEVICES = (
    *("null", "zero", "full", "random", "urandom"),
    # NVIDIA, also in Tegra and WSL; AMD; Intel; anything with a DRM driver
    *("nvidia*", "nvmap", "nvhost*", "nvgpu", "dxg", "kfd", "dri", "accel"),
    # Qualcomm, Arm, Huawei, Moore Threads
    *("kgsl*", "fastrpc*", "adsprpc*", "mali*", "davinci*", "devmm_svm", "hisi_hdc"),
    *("mtgpu*", "dma_heap", "udmabuf", "infiniband"),
)
"""What root may write below /dev, where it could also write disks."""

_CACHES: dict[str, tuple[tuple[str, str], ...]] = {
    "/dev/nvidiactl": (
        ("CUDA_CACHE_PATH", "~/.nv/ComputeCache"),
        ("__GL_SHADER_DISK_CACHE_PATH", "{cache}/nvidia"),
    ),
    "/dev/dxg": (("CUDA_CACHE_PATH", "~/.nv/ComputeCache"),),
    "/dev/dri/renderD*": (
        ("MESA_SHADER_CACHE_DIR", "{cache}/mesa_shader_cache"),
        ("MESA_SHADER_CACHE_DIR", "{cache}/mesa_shader_cache_db"),
        ("NEO_CACHE_DIR", "{cache}/neo_compiler_cache"),
        ("AMD_COMGR_CACHE_DIR", "{cache}/comgr"),
    ),
}
"""By device: where its driver keeps compiled kernels, as variable and default."""


class Confinement(NamedTuple):
    """What `confine` achieved, in words."""

    holds: list[str]
    lacks: list[str]
    """Each with the reason."""


def confine(writable: Sequence[Path], syscall: Syscall = kernel.syscall) -> Confinement:
    """Give up all that serving does not need, for good, as far as the system lets us.

    Call it when engine and devices are loaded: no program can be started after it.
    Of files only those below `writable` can be changed (made now where missing),
    temporary ones, and the GPU drivers' caches. What cannot be had is logged at info
    level, and returned.
    """
    done = Confinement([], [])
    if sys.platform != "linux":
        done.lacks.append("anything: this is not Linux")
        return done
    steps: dict[str, Callable[[], list[str]]] = {
        "no new privileges": _gain_none,
        "no core dumps": _forbid_cores,
        "dropped capabilities": _drop_capabilities,
        "landlock": lambda: _restrict_files(writable, syscall),
        "seccomp": lambda: seccomp.forbid(syscall),
    }
    for name, step in steps.items():
        try:
            gaps = step()
        except OSError as error:
            gaps = [error.strerror or str(error)]
        else:
            done.holds.append(name)
        done.lacks.extend(f"{name}: {gap}" for gap in gaps)
    for lack in done.lacks:
        _log.info("not confined by %s", lack)
    return done


def _gain_none() -> list[str]:
    kernel.prctl(_SET_NO_NEW_PRIVS, 1)
    return []


def _forbid_cores() -> list[str]:
    """A core file has weights, prompts and tokens in it, and so has a debugger."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The limit alone does not stop a handler such as systemd-coredump.
    kernel.prctl(_SET_DUMPABLE, 0)
    return []


def _drop_capabilities() -> list[str]:
    dropped = kernel.drop_capabilities(_KEPT_CAPABILITIES)
    if dropped and (older := kernel.other_threads()):
        return [f"{older} older threads keep theirs"]
    return []


def _restrict_files(writable: Sequence[Path], syscall: Syscall) -> list[str]:
    folders = [*writable, *_driver_caches()]
    gaps = _make(folders)
    shared = (Path(tempfile.gettempdir()), Path("/tmp"), Path("/dev/shm"))
    existing = [path for path in dict.fromkeys([*folders, *shared]) if path.is_dir()]
    return gaps + landlock.restrict(existing, _devices(), syscall)


def _devices() -> list[Path]:
    if os.geteuid() != 0:
        return [Path("/dev")]
    found = (glob.glob(name, root_dir="/dev") for name in _DEVICES)
    return [Path("/dev", name) for names in found for name in names]


def _driver_caches() -> Iterator[Path]:
    """The folders of the drivers that are in use here, also if not yet there."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    for device, places in _CACHES.items():
        if glob.glob(device):
            for variable, default in places:
                named = os.environ.get(variable) or default.format(cache=cache)
                yield Path(os.path.expanduser(named))


def _make(folders: Sequence[Path]) -> list[str]:
    """A rule needs a folder that is there; returns why one cannot be, in words."""
    gaps = []
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            gaps.append(f"{folder} cannot be made: {error.strerror}")
    return gaps
