"""Ctrl-C at the moment when C enters Python, which must not reach C."""

from __future__ import annotations

import ctypes as C
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from longwire.native import guard
from longwire.native.abi import Status
from longwire.native.guard import constant, defer_interrupts, install

PROTOTYPE = C.CFUNCTYPE(C.c_int, C.c_void_p)

SOURCE = """
#include <signal.h>
int interrupted_call(int (*slot)(void *)) { raise(SIGINT); return slot((void *)7); }
"""


class Table(C.Structure):
    _fields_ = [("slot", C.c_void_p)]


@pytest.fixture
def failures() -> list[BaseException]:
    return []


@pytest.fixture
def installed(failures: list[BaseException]) -> Callable[[Callable[..., Any]], Any]:
    """`installed(function)` is a guarded thunk of it, as C would call it."""

    def make(function: Callable[..., Any]) -> Any:
        table = Table()
        install(table, {"slot": PROTOTYPE}, {"slot": function}, failures.append)
        return PROTOTYPE(table.slot)

    return make


@pytest.fixture
def default_handler() -> Iterator[None]:
    """Python's own SIGINT handler, as in a program that did nothing about it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
    assert not guard._interrupts


@pytest.fixture(scope="module")
def interrupted_call(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A C function that is interrupted just before it calls a slot."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler (cc, gcc or clang)")
    folder: Path = tmp_path_factory.mktemp("interrupt")
    source, library = folder / "call.c", folder / "call.so"
    source.write_text(SOURCE)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", library, source], check=True, timeout=60
    )
    return C.CDLL(str(library)).interrupted_call


@pytest.mark.usefixtures("default_handler")
class TestInterrupts:
    def test_the_result_holds_and_the_device_is_told(
        self,
        installed: Callable[..., Any],
        failures: list[BaseException],
        interrupted_call: Any,
    ) -> None:
        defer_interrupts()
        # Python 3.10 looks for signals later, inside the guard's `try`: C then gets
        # the slot's failure value, which is as well defined.
        expected = 8 if sys.version_info >= (3, 11) else Status.FAILED
        assert interrupted_call(installed(lambda argument: argument + 1)) == expected
        (failure,) = failures
        assert isinstance(failure, KeyboardInterrupt)

    def test_a_constant_keeps_it_for_the_next_call(
        self,
        installed: Callable[..., Any],
        failures: list[BaseException],
        interrupted_call: Any,
    ) -> None:
        defer_interrupts()
        assert interrupted_call(installed(constant(5))) == 5
        assert failures == []
        assert installed(lambda argument: 3)(0) == 3
        (failure,) = failures
        assert isinstance(failure, KeyboardInterrupt)

    def test_inside_the_function_it_is_raised(
        self, installed: Callable[..., Any], failures: list[BaseException]
    ) -> None:
        defer_interrupts()

        def interrupted(_argument: int) -> int:
            signal.raise_signal(signal.SIGINT)
            return 9

        assert installed(interrupted)(0) == -1
        (failure,) = failures
        assert isinstance(failure, KeyboardInterrupt)

    def test_elsewhere_it_is_raised(self) -> None:
        defer_interrupts()
        with pytest.raises(KeyboardInterrupt):
            guard._on_interrupt(signal.SIGINT, sys._getframe())
        with pytest.raises(KeyboardInterrupt):
            guard._on_interrupt(signal.SIGINT, None)

    def test_twice_counts_once(
        self, installed: Callable[..., Any], failures: list[BaseException]
    ) -> None:
        def twice(_argument: int) -> int:
            for _ in range(2):
                guard._on_interrupt(signal.SIGINT, sys._getframe(1))
            return 4

        assert installed(twice)(0) == 4
        assert len(failures) == 1


class TestInstallation:
    @pytest.mark.usefixtures("default_handler")
    def test_it_takes_the_place_of_the_default(self) -> None:
        defer_interrupts()
        defer_interrupts()
        assert signal.getsignal(signal.SIGINT) is guard._on_interrupt

    @pytest.mark.usefixtures("default_handler")
    @pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL, print])
    def test_other_handlers_stay(self, handler: Any) -> None:
        signal.signal(signal.SIGINT, handler)
        defer_interrupts()
        assert signal.getsignal(signal.SIGINT) is handler

    @pytest.mark.usefixtures("default_handler")
    def test_other_threads_leave_it_alone(self) -> None:
        thread = threading.Thread(target=defer_interrupts)
        thread.start()
        thread.join(5)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
