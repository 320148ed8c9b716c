"""A model laid out over devices: what was asked for, and what was loaded."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from longwire.client.connection import Connection
from longwire.client.device import RemoteDevice
from longwire.client.failures import check_all
from longwire.client.upload import Upload, uploading
from longwire.client.uploader import Delivery
from longwire.errors import CallFailed, UsageError
from longwire.host.split import check_split, split_model
from longwire.host.upload import model_upload, split_files
from longwire.models.gguf import gguf_head
from longwire.native.compute import list_devices
from longwire.native.engine import NativeEngine
from longwire.native.model import (
    FLASH_ATTENTION,
    SPLIT_MODES,
    NativeContext,
    NativeModel,
    Placement,
)
from longwire.native.plugin import DevicePlugin

__all__ = ["DeviceReport", "Layout", "LoadedModel"]


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """What one device holds of a model."""

    name: str
    endpoint: str
    """"local" for a device of this machine."""
    layers: int
    memory: int
    """Bytes in its buffers: weights, KV cache and compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a model is to be laid out; `Engine` documents the fields."""

    model: Path
    devices: Sequence[str] | None
    native_devices: Sequence[int]
    n_gpu_layers: int
    split_mode: str
    tensor_split: Sequence[float]
    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_threads: int
    exact: bool
    flash_attention: str

    def __post_init__(self) -> None:
        if not self.model.is_file():
            raise UsageError(f"there is no model file {self.model}")
        if self.split_mode not in SPLIT_MODES:
            known = ", ".join(SPLIT_MODES)
            raise UsageError(f"split mode {self.split_mode!r} is not one of {known}")
        if self.flash_attention not in FLASH_ATTENTION:
            known = ", ".join(FLASH_ATTENTION)
            given = self.flash_attention
            raise UsageError(f"flash attention {given!r} is not one of {known}")
        if self.split_mode == "tensor" and self.flash_attention == "off":
            raise UsageError("split mode 'tensor' needs flash attention")


class LoadedModel:
    """A model and its context on one set of devices. `close` frees both."""

    def __init__(
        self,
        native: NativeEngine,
        layout: Layout,
        remote_devices: Sequence[RemoteDevice],
        on_progress: Callable[[float], None] | None = None,
        on_delivery: Callable[[Sequence[Delivery]], None] | None = None,
    ) -> None:
        """Load over remote devices first, then this machine's GPUs.

        Raises:
            UsageError: a device name that nobody has, or a split that the model
                cannot take.
            RemoteError: a worker failed on the way.
            CallFailed: llama.cpp could not load the model or make the context.
        """
        self.remote_devices = list(remote_devices)
        self.placement = Placement()
        self._native = native
        self.deliveries: list[Delivery] = []
        """What the load brought to each worker."""
        self.index_s = 0.0
        """What of the load went into the model's index, which is made once."""
        self._on_progress = on_progress
        self._on_delivery = on_delivery
        self._share = 0.0
        """Of the model, that llama.cpp has handed over."""
        files = split_files(layout.model)
        self._size = sum(file.stat().st_size for file in files if file.is_file())
        self._model: NativeModel | None = None
        self._context: NativeContext | None = None
        self._demanding: list[DevicePlugin] = []
        """Where this model needs every buffer that is asked for."""
        try:
            with self.placement.watching():
                self._load(layout)
            self.check()
        except CallFailed as error:
            self.close()
            # The reason is usually a worker's.
            self.check()
            reason = self.placement.error
            if not reason:
                raise
            raise CallFailed(error.function, f"{error.status}: {reason}") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Free context and model; idempotent."""
        if self._context is not None:
            self._context.close()
        if self._model is not None:
            self._model.close()
        demanding, self._demanding = self._demanding, []
        for plugin in demanding:
            plugin.demanding -= 1

    def _demand(self) -> None:
        """Have every allocation succeed while there is this model."""
        self._demanding = [device.plugin for device in self.remote_devices]
        for plugin in self._demanding:
            plugin.demanding += 1

    def check(self) -> None:
        """Raise what went wrong on any remote device."""
        check_all(device.connection for device in self.remote_devices)

    @property
    def model(self) -> NativeModel:
        if self._model is None:
            raise UsageError("the model is not loaded")
        return self._model

    @property
    def context(self) -> NativeContext:
        if self._context is None:
            raise UsageError("the model is not loaded")
        return self._context

    def _load(self, layout: Layout) -> None:
        chosen = self._choose(layout.devices)
        if layout.split_mode == "tensor":
            self._check_split(layout, [name for name, _ in chosen])
            self._demand()
        addresses = [address for _, address in chosen]
        started = time.perf_counter()
        upload = model_upload(self._native, layout.model, self._connections(addresses))
        self.index_s = time.perf_counter() - started
        with uploading(upload):
            self._model = self._load_model(layout, addresses, upload)
            upload.finish(lambda: self._tell(upload))
            self._tell(upload)
        self.deliveries = upload.deliveries
        self._context = NativeContext(
            self._model,
            n_ctx=layout.n_ctx,
            n_batch=layout.n_batch,
            n_ubatch=layout.n_ubatch,
            n_threads=layout.n_threads,
            flash_attention=layout.flash_attention,
        )

    def _check_split(self, layout: Layout, names: Sequence[str]) -> None:
        files = split_files(layout.model)
        heads = [gguf_head(self._native, file) for file in files]
        # Those of the caller come first and have no name here.
        given = [f"device {n}" for n in range(len(layout.native_devices))]
        check_split(split_model(heads), [*given, *names], layout.tensor_split)

    def _choose(self, names: Sequence[str] | None) -> list[tuple[str, int]]:
        """Names and addresses, in the order in which they are to be used."""
        offered = {
            d.name.lower(): (d.name, d.plugin.address) for d in self.remote_devices
        }
        for device in list_devices(self._native):
            if device.accelerates and device.name.lower() not in offered:
                offered[device.name.lower()] = (device.name, device.address)
        if names is None:
            return list(offered.values())
        missing = [name for name in names if name.lower() not in offered]
        if missing:
            known = ", ".join(name for name, _ in offered.values()) or "none"
            raise UsageError(f"no device named {missing[0]!r}; there are: {known}")
        return [offered[name.lower()] for name in names]

    def _load_model(
        self, layout: Layout, addresses: Sequence[int], upload: Upload
    ) -> NativeModel:
        try:
            return NativeModel(
                self._native,
                layout.model,
                devices=[*layout.native_devices, *addresses],
                n_gpu_layers=layout.n_gpu_layers,
                split_mode=layout.split_mode,
                tensor_split=layout.tensor_split,
                use_extra_bufts=not layout.exact,
                on_progress=lambda share: self._progress(upload, share),
            )
        except CallFailed:
            # All that llama.cpp knows is that it was stopped.
            upload.check()
            raise

    def _connections(self, addresses: Sequence[int]) -> list[Connection]:
        chosen = [d for d in self.remote_devices if d.plugin.address in addresses]
        return list(dict.fromkeys(device.connection for device in chosen))

    def _progress(self, upload: Upload, share: float) -> bool:
        """llama.cpp is about to hand over the next weight; False stops it."""
        self._share = share
        self._tell(upload)
        connections = [device.connection for device in self.remote_devices]
        if not upload.failed and all(c.healthy and not c.refusal for c in connections):
            return True
        # llama.cpp frees the buffers next: nothing more need go there.
        upload.stop()
        return False

    def _tell(self, upload: Upload) -> None:
        if self._on_progress is not None:
            here = self._share - upload.under_way / self._size
            self._on_progress(max(0.0, here))
        if self._on_delivery is not None:
            self._on_delivery(upload.deliveries)

    def report(self) -> list[DeviceReport]:
        """What each device holds: remote ones first, then this machine's."""
        reports = [
            DeviceReport(d.name, str(d.endpoint), self._layers_of(d), d.allocated)
            for d in self.remote_devices
        ]
        names = {d.name for d in self.remote_devices}
        layers = {k: v for k, v in self.placement.layers.items() if k not in names}
        sizes = self._local_sizes(names)
        for name in dict.fromkeys([*layers, *sizes]):
            count = len(layers.get(name, ()))
            reports.append(DeviceReport(name, "local", count, sizes.get(name, 0)))
        return reports

    def _layers_of(self, device: RemoteDevice) -> int:
        named = self.placement.layers.get(device.name)
        return len(device.layers if named is None else named)

    def _local_sizes(self, remote_names: set[str]) -> dict[str, int]:
        """Bytes by local device; the CPU's buffer types are one device."""
        sizes: dict[str, int] = {}
        for buffer_type, size in self.placement.sizes.items():
            device = "CPU" if buffer_type.startswith("CPU") else buffer_type
            if device not in remote_names:
                sizes[device] = sizes.get(device, 0) + size
        return sizes
