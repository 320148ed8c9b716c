"""The three functions by which ggml's meta backend sums over devices.

With `--split-mode tensor` the meta backend asks the first device's registry for
them. `ggml_backend_comm_init` takes the backends in rank order and may answer
NULL, and an all-reduce may answer false: ggml then sums through the host.
"""

from __future__ import annotations

import ctypes as C
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from longwire.native import abi
from longwire.native.contract import HostDevice
from longwire.native.guard import install, log_failure

__all__ = ["Communicate", "HostCommunicator", "procedures"]

D = TypeVar("D", bound=HostDevice)


class HostCommunicator(Protocol):
    """A communicator as ggml drives it. Tensors are native addresses."""

    size: int
    """Devices in it."""

    def allreduce(self, tensors: Sequence[int]) -> bool:
        """Have each device's tensor become the sum of all; False: ggml does it.

        A tensor may be 0.
        """

    def free(self) -> None:
        """Have the members leave each other; what is asked for later is not done."""

    def failed(self, error: BaseException) -> None:
        """One of the calls above raised; the caller of ggml is to hear of it."""


Communicate = Callable[[Sequence["D | None"]], HostCommunicator | None]
"""Makes one over devices in rank order; None stands for a device of others. It
returns None where there is no way but the host."""


def procedures(
    communicate: Communicate[D], devices: Mapping[int, D]
) -> dict[bytes, int]:
    """The functions' addresses by name. `devices` knows the live backends."""
    communicators: dict[int, HostCommunicator] = {}
    numbers = itertools.count(1)

    def comm_init(backends: int | None, n: int) -> int | None:
        members = [devices.get(address) for address in _pointers(backends, n)]
        try:
            made = communicate(members)
        except BaseException as error:
            # Nothing of this is for the communicators there are to answer for.
            log_failure(error)
            for member in members:
                if member is not None:
                    member.failed(error)
            return None
        if made is None:
            return None
        # A number for a pointer: nobody follows it.
        context = next(numbers)
        communicators[context] = made
        return context

    def comm_free(context: int | None) -> None:
        made = communicators.pop(context or 0, None)
        if made is None:
            return
        try:
            made.free()
        except BaseException as error:
            made.failed(error)

    def comm_allreduce(context: int, tensors: int | None) -> bool:
        made = communicators[context]
        try:
            return made.allreduce(_pointers(tensors, made.size))
        except BaseException as error:
            made.failed(error)
            return False

    def failed(error: BaseException) -> None:
        # A Ctrl-C that struck on the way out of C: some communicator has to end
        # for the caller of ggml to hear of it.
        for made in communicators.values():
            made.failed(error)
        if not communicators:
            log_failure(error)

    table = abi.Comm()
    slots: dict[str, Callable[..., Any]] = {
        "ggml_backend_comm_init": comm_init,
        "ggml_backend_comm_free": comm_free,
        "ggml_backend_comm_allreduce_tensor": comm_allreduce,
    }
    install(table, abi.COMM, slots, failed)
    return {name.encode(): getattr(table, name) for name in slots}


def _pointers(array: int | None, n: int) -> list[int]:
    """The elements of a C array of pointers; 0 for NULL."""
    if not array:
        return []
    return list((C.c_size_t * n).from_address(array))
