"""Communicators as ggml's meta backend finds and drives them."""

from __future__ import annotations

import ctypes as C
from collections.abc import Sequence
from typing import Any, cast

import pytest

from longwire.native import abi
from longwire.native.contract import HostDevice
from longwire.native.plugin import Registry
from support.ggml import Ggml


class Boom(Exception):
    """What the communicator below raises when told to."""


class Idle:
    """A device that is only ever named and given a backend."""

    name = "IDLE"
    description = "does nothing"

    def __getattr__(self, verb: str) -> Any:
        def called(*arguments: object) -> None:
            raise AssertionError(verb)

        return called


class Recorded:
    """A communicator that notes calls, and raises in the one that is set to fail."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls: list[tuple[Any, ...]] = []
        self.failures: list[BaseException] = []
        self.fails = ""
        self.sums = True

    def _note(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, *arguments))
        if name == self.fails:
            raise Boom(name)

    def allreduce(self, tensors: Sequence[int]) -> bool:
        self._note("allreduce", *tensors)
        return self.sums

    def free(self) -> None:
        self._note("free")

    def failed(self, error: BaseException) -> None:
        self.failures.append(error)


class Meta:
    """Asks a registry for the functions, as the meta backend does."""

    def __init__(self, ggml: Ggml, registry: Registry) -> None:
        self._find = abi.REG_I["get_proc_address"](
            abi.Reg.from_address(registry.address).get_proc_address
        )
        self._registry = registry

    def find(self, name: str) -> int | None:
        address: int | None = self._find(self._registry.address, name.encode())
        return address

    def call(self, name: str, *arguments: Any) -> Any:
        name = f"ggml_backend_comm_{name}"
        return abi.COMM[name](self.find(name))(*arguments)

    def init(self, *backends: int) -> int | None:
        array = (C.c_size_t * len(backends))(*backends)
        context: int | None = self.call("init", C.addressof(array), len(backends))
        return context

    def allreduce(self, context: int, *tensors: int) -> bool:
        array = (C.c_size_t * len(tensors))(*tensors)
        done: bool = self.call("allreduce_tensor", context, C.addressof(array))
        return done


class Rig:
    """Two devices of two registries, and the communicators made of them."""

    def __init__(self, ggml: Ggml) -> None:
        self.made: list[Recorded] = []
        self.asked: list[list[HostDevice | None]] = []
        self.refuses = False
        self.library = ggml.library
        self.devices = [cast(HostDevice, Idle()) for _ in range(2)]
        registries = [Registry(ggml.engine, self._communicate) for _ in self.devices]
        self.refused: list[BaseException] = []
        for device in self.devices:
            device.failed = self.refused.append  # type: ignore[method-assign]
        self.plugins = [
            registry.add(device)
            for registry, device in zip(registries, self.devices, strict=True)
        ]
        self.meta = Meta(ggml, registries[0])

    def _communicate(self, devices: Sequence[HostDevice | None]) -> Recorded | None:
        self.asked.append(list(devices))
        if self.refuses:
            return None
        self.made.append(Recorded(len(devices)))
        return self.made[-1]

    def backends(self) -> list[int]:
        return [
            self.library.ggml_backend_dev_init(p.address, None) for p in self.plugins
        ]


@pytest.fixture
def rig(ggml: Ggml) -> Rig:
    return Rig(ggml)


def test_devices_come_in_rank_order(rig: Rig) -> None:
    first, second = rig.backends()
    assert rig.meta.init(second, first)
    assert rig.asked == [rig.devices[::-1]]
    assert rig.meta.init(first, 12345678, second)
    assert rig.asked[1] == [rig.devices[0], None, rig.devices[1]]


def test_a_freed_backend_is_nobodys(rig: Rig) -> None:
    first, second = rig.backends()
    rig.library.ggml_backend_free(second)
    rig.meta.init(first, second)
    assert rig.asked == [[rig.devices[0], None]]


def test_a_communicator_is_driven_by_its_context(rig: Rig) -> None:
    backends = rig.backends()
    contexts = [rig.meta.init(*backends) for _ in range(2)]
    assert None not in contexts and contexts[0] != contexts[1]
    one, other = rig.made
    assert contexts[1] is not None
    assert rig.meta.allreduce(contexts[1], 16, 0) is True
    other.sums = False
    assert rig.meta.allreduce(contexts[1], 32, 48) is False
    rig.meta.call("free", contexts[1])
    assert other.calls == [("allreduce", 16, 0), ("allreduce", 32, 48), ("free",)]
    assert one.calls == []


def test_no_communicator_is_null(rig: Rig) -> None:
    rig.refuses = True
    assert rig.meta.init(*rig.backends()) is None
    rig.meta.call("free", None)


def test_a_registry_without_them_finds_nothing(ggml: Ggml) -> None:
    meta = Meta(ggml, Registry(ggml.engine))
    assert meta.find("ggml_backend_comm_init") is None


@pytest.mark.parametrize(
    "name", ["ggml_backend_comm", "ggml_backend_split_buffer_type", ""]
)
def test_other_names_find_nothing(rig: Rig, name: str) -> None:
    assert rig.meta.find(name) is None


def test_what_is_raised_stays_in_python(rig: Rig) -> None:
    context = rig.meta.init(*rig.backends())
    assert context is not None
    (made,) = rig.made
    made.fails = "allreduce"
    assert rig.meta.allreduce(context, 16, 32) is False
    made.fails = "free"
    rig.meta.call("free", context)
    assert [str(error) for error in made.failures] == ["allreduce", "free"]


def test_a_failure_to_make_one_is_null(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backends = rig.backends()
    assert rig.meta.init(*backends)
    rig.asked = None  # type: ignore[assignment]
    assert rig.meta.init(*backends) is None
    assert "AttributeError" in caplog.text
    # The devices hear of it, and not those who sum already.
    assert [type(error) for error in rig.refused] == [AttributeError] * 2
    assert rig.made[0].failures == []


def test_an_unknown_context_is_a_failure(rig: Rig) -> None:
    assert rig.meta.allreduce(99, 16) is False
