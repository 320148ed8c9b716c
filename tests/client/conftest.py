"""Scripted servers that are gone when their test is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from longwire.native.profiles import DEFAULT_ENGINE
from support.ggml import Ggml, open_ggml
from support.rig import Rig
from support.scripted import Listener, Scripted, start_scripted


@pytest.fixture
def ggml() -> Ggml:
    return open_ggml(DEFAULT_ENGINE)


@pytest.fixture
def scripted() -> Iterator[Callable[..., Scripted]]:
    """`scripted(answers, dialect)` is a connection to a server of its own."""
    with ExitStack() as stack:

        def start(*arguments: object, **options: object) -> Scripted:
            pair = start_scripted(*arguments, **options)  # type: ignore[arg-type]
            stack.callback(pair.close)
            return pair

        yield start


@pytest.fixture
def listener() -> Iterator[Callable[..., Listener]]:
    """`listener(answers, dialect)` is a port with such servers behind it."""
    with ExitStack() as stack:

        def start(*arguments: object) -> Listener:
            port = Listener(*arguments)  # type: ignore[arg-type]
            stack.callback(port.close)
            return port

        yield start


@pytest.fixture
def rig(ggml: Ggml, scripted: Callable[..., Scripted]) -> Callable[..., Rig]:
    """`rig(answers, dialect, index=0)` is a device with a server of its own."""

    def make(*arguments: object, index: int = 0, **options: object) -> Rig:
        return Rig(ggml, scripted(*arguments, **options), index)

    return make


@pytest.fixture
def context(ggml: Ggml) -> Iterator[int]:
    with ggml.context() as context:
        yield context
