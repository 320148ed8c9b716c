"""The other half of ggml: C calls in, Python devices answer.

The life of one call: libllama calls `ggml_backend_tensor_set`; ggml finds the
tensor's buffer and jumps through its `set_tensor` slot; the slot is a thunk
made here; the thunk looks the buffer's address up and calls `set_tensor` of
the Python object that owns it. An exception on the way is handed to the
device's `failed`, and C gets the slot's failure value: nothing is ever raised
through C (`native/guard.py`).

Everything C keeps a pointer to (tables, names, thunks) lives as long as the
process, because ggml never forgets a device.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable, Sequence
from typing import Any

from longwire.native import abi
from longwire.native.absent import Absent
from longwire.native.collectives import Communicate, procedures
from longwire.native.contract import HostBuffer, HostDevice, Rows
from longwire.native.engine import NativeEngine
from longwire.native.guard import constant, defer_interrupts, install, log_failure

__all__ = ["DevicePlugin", "Registry", "device_array"]

_USAGE = abi.Buffer.usage.offset


class Registry:
    """A ggml registry named RPC, and the devices under it.

    libllama gives devices of a registry with that name the place of remote
    devices in its device order.
    """

    def __init__(
        self,
        engine: NativeEngine,
        communicate: Communicate[HostDevice] | None = None,
    ) -> None:
        """`communicate` makes communicators; without it ggml sums on the host."""
        self.engine = engine
        self.plugins: list[DevicePlugin] = []
        self._registered = False
        self._name = C.create_string_buffer(b"RPC")
        self._struct = abi.Reg(api_version=engine.profile.api_version)
        self.address = C.addressof(self._struct)
        found: dict[bytes, int] = {}
        if communicate is not None:
            found = procedures(communicate, _backend_devices)
        slots: dict[str, Callable[..., Any]] = {
            "get_name": constant(C.addressof(self._name)),
            "get_device_count": lambda reg: len(self.plugins),
            "get_device": lambda reg, i: self.plugins[i].address,
            "get_proc_address": lambda reg, name: found.get(name),
        }
        install(self._struct, abi.REG_I, slots, log_failure)
        defer_interrupts()

    def add(self, device: HostDevice) -> DevicePlugin:
        """Give a device its native face under this registry."""
        plugin = DevicePlugin(self, device)
        self.plugins.append(plugin)
        return plugin

    def register(self) -> None:
        """Show the devices to everything that lists ggml's devices; for good.

        Idempotent. Devices added later stay unseen: ggml takes the list once.
        """
        if not self._registered:
            self._registered = True
            self.engine.library.ggml_backend_register(self.address)


class DevicePlugin:
    """The native face of one device: its tables, and its live buffers."""

    def __init__(self, registry: Registry, device: HostDevice) -> None:
        self.device = device
        self.buffers: dict[int, HostBuffer] = {}
        """By address of the `ggml_backend_buffer`."""
        self.demanding = 0
        """Models that share tensors between devices: there ggml ends the process for
        want of a buffer, so that while there are any, each allocation succeeds."""
        self._library = registry.engine.library
        self._name = C.create_string_buffer(device.name.encode())
        self._description = C.create_string_buffer(device.description.encode())
        self._guid = C.create_string_buffer(_GUID, 16)
        self._backends: dict[int, abi.Backend] = {}
        self._events: dict[int, abi.Event] = {}

        self._struct = abi.Device(reg=registry.address)
        self.address = C.addressof(self._struct)
        self._buffer_type = registry.engine.profile.buffer_type(device=self.address)
        self.buffer_type = C.addressof(self._buffer_type)
        self._buffer_interface = abi.BufferInterface()
        self._backend_template = abi.Backend(
            guid=C.addressof(self._guid), device=self.address
        )
        fail = device.failed
        install(self._struct, abi.DEVICE_I, self._device_slots(), fail)
        install(self._buffer_type, abi.BUFT_I, self._buffer_type_slots(), fail)
        install(self._buffer_interface, abi.BUFFER_I, self._buffer_slots(), fail)
        install(self._backend_template, abi.BACKEND_I, self._backend_slots(), fail)
        self._synchronize = self._backend_template.synchronize
        _kept.append(self)

    def usage(self, buffer: int) -> abi.Usage:
        """What the host uses a buffer for (`ggml_backend_buffer_set_usage`)."""
        return abi.Usage(C.c_int.from_address(buffer + _USAGE).value)

    def _device_slots(self) -> dict[str, Callable[..., Any]]:
        device = self.device
        name = C.addressof(self._name)
        description = C.addressof(self._description)
        buffer_type = self.buffer_type

        def get_memory(_dev: int, free: int, total: int) -> None:
            # The caller's variables are not initialised.
            C.c_size_t.from_address(free).value = 0
            C.c_size_t.from_address(total).value = 0
            sizes = device.memory()
            C.c_size_t.from_address(free).value = sizes[0]
            C.c_size_t.from_address(total).value = sizes[1]

        def get_props(_dev: int, address: int) -> None:
            props = abi.DeviceProps.from_address(address)
            props.name = name
            props.description = description
            props.type = abi.DeviceType.GPU
            props.device_id = None
            props.async_ = props.events = props.mmap_support = True
            props.host_buffer = props.buffer_from_host_ptr = False
            props.memory_free, props.memory_total = device.memory()

        def init_backend(_dev: int, _params: int) -> int:
            backend = abi.Backend.from_buffer_copy(self._backend_template)
            address = C.addressof(backend)
            self._backends[address] = backend
            _backend_devices[address] = device
            return address

        def event_new(dev: int) -> int:
            event = abi.Event(device=dev)
            address = C.addressof(event)
            self._events[address] = event
            return address

        return {
            "get_name": constant(name),
            "get_description": constant(description),
            "get_memory": get_memory,
            # llama.cpp offloads to devices of this type only.
            "get_type": constant(abi.DeviceType.GPU),
            "get_props": get_props,
            "init_backend": init_backend,
            "get_buffer_type": constant(buffer_type),
            "supports_op": lambda dev, op: device.supports_op(op),
            "supports_buft": lambda dev, buft: buft == buffer_type,
            "event_new": event_new,
            "event_free": lambda dev, event: self._events.pop(event) and None,
            "event_synchronize": lambda dev, event: device.synchronize(),
        }

    def _buffer_type_slots(self) -> dict[str, Callable[..., Any]]:
        device = self.device
        name = C.addressof(self._name)

        def allocated(size: int) -> tuple[HostBuffer, int] | None:
            if not self.demanding:
                return device.alloc_buffer(size)
            try:
                found = device.alloc_buffer(size)
                if found is not None:
                    return found
                device.lacks(size)
            except BaseException as error:
                device.failed(error)
            return Absent(), size

        def alloc_buffer(buffer_type: int, size: int) -> int | None:
            found = allocated(size)
            if found is None:
                return None
            buffer, true_size = found
            address: int = self._library.ggml_backend_buffer_init(
                buffer_type, self._buffer_interface, None, true_size
            )
            buffer.address = address
            self.buffers[address] = buffer
            return address

        def alloc_size(_buffer_type: int, tensor: int) -> int:
            try:
                return device.alloc_size(tensor)
            except BaseException as error:
                device.failed(error)
            # Less would let ggml lay tensors over each other.
            size: int = self._library.ggml_nbytes(tensor)
            return size

        return {
            "get_name": constant(name),
            "alloc_buffer": alloc_buffer,
            "get_alignment": lambda buft: device.alignment(),
            "get_max_size": lambda buft: device.max_size(),
            "get_alloc_size": alloc_size,
            "is_host": constant(False),
        }

    def _buffer_slots(self) -> dict[str, Callable[..., Any]]:
        buffers = self.buffers

        def call(method: str) -> Callable[..., Any]:
            def slot(buffer: int, *arguments: Any) -> Any:
                return getattr(buffers[buffer], method)(*arguments)

            return slot

        def init_tensor(buffer: int, tensor: int) -> int:
            ok = buffers[buffer].init_tensor(tensor)
            return abi.Status.SUCCESS if ok else abi.Status.FAILED

        slots = {name: call(name) for name in _BUFFER_METHODS}
        # A step calls this one most.
        slots["set_tensor"] = lambda buffer, *a: buffers[buffer].set_tensor(*a)
        slots["free_buffer"] = lambda buffer: buffers.pop(buffer).free()
        slots["get_base"] = lambda buffer: buffers[buffer].base()
        slots["init_tensor"] = init_tensor
        slots["set_tensor_2d"] = lambda buffer, tensor, *rows: buffers[
            buffer
        ].set_tensor_2d(tensor, Rows(*rows))
        slots["get_tensor_2d"] = lambda buffer, tensor, *rows: buffers[
            buffer
        ].get_tensor_2d(tensor, Rows(*rows))
        return slots

    def _backend_slots(self) -> dict[str, Callable[..., Any]]:
        device = self.device
        name = C.addressof(self._name)

        backends = self._backends

        # llama.cpp synchronizes some seventeen times per token, of which two have
        # something to wait for. ggml does nothing where there is no function.
        def synchronize(backend: int) -> None:
            backends[backend].synchronize = None
            device.synchronize()

        def rouse(backend: int) -> None:
            backends[backend].synchronize = self._synchronize

        def get_tensor_async(backend: int, *arguments: int) -> None:
            rouse(backend)
            device.get_tensor_async(*arguments)

        def get_tensor_2d_async(backend: int, tensor: int, *rows: int) -> None:
            rouse(backend)
            device.get_tensor_2d_async(tensor, Rows(*rows))

        def cpy_tensor_async(_src: int, dst: int, *tensors: int) -> bool:
            rouse(dst)
            return device.cpy_tensor_async(*tensors)

        def graph_compute(backend: int, graph: int) -> int:
            rouse(backend)
            ok = device.graph_compute(graph)
            return abi.Status.SUCCESS if ok else abi.Status.FAILED

        def free(backend: int) -> None:
            _backend_devices.pop(backend, None)
            self._backends.pop(backend)

        return {
            "get_name": constant(name),
            "free": free,
            "set_tensor_async": lambda backend, *a: device.set_tensor_async(*a),
            "get_tensor_async": get_tensor_async,
            "set_tensor_2d_async": lambda backend, tensor, *rows: (
                device.set_tensor_2d_async(tensor, Rows(*rows))
            ),
            "get_tensor_2d_async": get_tensor_2d_async,
            "cpy_tensor_async": cpy_tensor_async,
            "synchronize": synchronize,
            "graph_compute": graph_compute,
            # One connection keeps one order, so what an event would order is
            # ordered already.
            "event_record": constant(None),
            "event_wait": constant(None),
        }


_GUID = bytes.fromhex("4c6f6e67776972652d6467676d6c0001")
_BUFFER_METHODS = (
    "memset_tensor",
    "set_tensor",
    "get_tensor",
    "cpy_tensor",
    "clear",
)

_kept: list[DevicePlugin] = []

_backend_devices: dict[int, HostDevice] = {}
"""Whose the live backends are, of all registries: a communicator spans several."""


def device_array(addresses: Sequence[int]) -> C.Array[C.c_void_p]:
    """A NULL-terminated `ggml_backend_dev_t` array; the caller keeps it alive."""
    return (abi.P * (len(addresses) + 1))(*addresses, None)
