"""What wakes the supervisor's loop."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator

import pytest

from longwire.server.alarm import Alarm

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    alarm = Alarm()
    yield alarm
    alarm.give_signals_back()
    alarm.close()


@pytest.fixture
def asked(alarm: Alarm) -> list[str]:
    """What signals have asked for."""
    asked: list[str] = []
    alarm.take_signals(
        drain=lambda: asked.append("drain"),
        stop=lambda: asked.append("stop"),
        reload=lambda: asked.append("reload"),
    )
    return asked


def rings(alarm: Alarm) -> bool:
    return bool(select.select([alarm.pipe], [], [], 0)[0])


def test_a_ring_wakes_until_it_is_hushed(alarm: Alarm) -> None:
    assert not rings(alarm)
    thread = threading.Thread(target=alarm.ring)
    thread.start()
    thread.join()
    alarm.ring()
    assert rings(alarm)
    alarm.hush()
    assert not rings(alarm)
    # For nothing.
    alarm.hush()


def test_a_full_pipe_and_a_closed_one_are_no_error(alarm: Alarm) -> None:
    for _ in range(100_000):
        alarm.ring()
    assert rings(alarm)
    alarm.close()
    alarm.ring()


def test_signals_ask_and_wake(alarm: Alarm, asked: list[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
        assert rings(alarm)
        alarm.hush()
    assert asked == ["drain", "stop"]


def test_sighup_asks_for_new_sessions(alarm: Alarm, asked: list[str]) -> None:
    os.kill(os.getpid(), signal.SIGHUP)
    assert asked == ["reload"]
    assert rings(alarm)


@pytest.mark.parametrize("ignored", [False, True])
def test_signals_are_given_back(alarm: Alarm, ignored: bool) -> None:
    hung_up = signal.getsignal(signal.SIGHUP)
    if ignored:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        before = [signal.getsignal(number) for number in SIGNALS]
        alarm.take_signals(lambda: None, lambda: None, lambda: None)
        during = [signal.getsignal(number) for number in SIGNALS]
        changed = [a is not b for a, b in zip(before, during, strict=True)]
        assert changed == [True, True, not ignored]
        alarm.give_signals_back()
        assert [signal.getsignal(number) for number in SIGNALS] == before
        # Nothing writes to the pipe any more.
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.signal(signal.SIGHUP, hung_up)


def test_other_threads_take_no_signals(alarm: Alarm) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]

    def take() -> None:
        alarm.take_signals(lambda: None, lambda: None, lambda: None)

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    assert [signal.getsignal(number) for number in SIGNALS] == before
