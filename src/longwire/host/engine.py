"""`Engine`: a model laid out over devices, ready to generate."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from longwire.client import remote
from longwire.client.device import RemoteDevice
from longwire.errors import CallFailed, UsageError
from longwire.host.generation import Generation
from longwire.host.sampling import Sampling
from longwire.native.abi import DeviceType
from longwire.native.compute import list_devices
from longwire.native.engine import load_engine
from longwire.native.model import SPLIT_MODES, NativeContext, NativeModel, Placement
from longwire.native.profiles import DEFAULT_ENGINE

__all__ = ["DeviceReport", "Engine"]


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """What one device holds of a model."""

    name: str
    endpoint: str
    """"local" for a device of this machine."""
    layers: int
    memory: int
    """Bytes in its buffers: weights, KV cache and compute."""


class Engine:
    """A loaded model with one context.

        engine = Engine("model.gguf", rpc="10.0.0.2,10.0.0.3:50052")
        for token in engine.generate("Once upon a time", max_tokens=64):
            print(token.text, end="", flush=True)

    Remote devices come first in the layer order, then this machine's GPUs.
    Not safe for use from several threads at once.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        rpc: str | Sequence[RemoteDevice] = (),
        engine: str = DEFAULT_ENGINE,
        devices: Sequence[str] | None = None,
        native_devices: Sequence[int] = (),
        n_gpu_layers: int = -1,
        split_mode: str = "layer",
        tensor_split: Sequence[float] = (),
        n_ctx: int = 4096,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        n_threads: int | None = None,
        exact: bool = False,
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        """Load `model`.

        `rpc` are endpoints, whose connections this engine then owns, or
        devices from `longwire.connect`. `devices` picks among remote and local
        ones by name, in that order; without it all are used. `native_devices`
        are addresses of further `ggml_backend_device`s, put in front.
        `exact` keeps the host from repacking weights, so that results equal a
        local `exact` run bit for bit.

        Raises:
            UsageError: settings that cannot be.
            RemoteError: an endpoint failed, while connecting or loading.
            NativeError: the engine, the model or the context cannot be loaded.
        """
        path = Path(model)
        if not path.is_file():
            raise UsageError(f"there is no model file {path}")
        if split_mode not in SPLIT_MODES:
            raise UsageError(
                f"split mode {split_mode!r} is not one of {', '.join(SPLIT_MODES)}"
            )
        self._native = load_engine(engine)
        self._model: NativeModel | None = None
        self._context: NativeContext | None = None
        self._owned: list[RemoteDevice] = []
        if isinstance(rpc, str):
            self._owned = remote.connect(rpc, engine=engine)
            rpc = self._owned
        self.remote_devices = list(rpc)
        self._placement = Placement()
        self._on_progress = on_progress
        try:
            chosen = self._choose(devices)
            with self._placement.watching():
                self._load(
                    path,
                    devices=[*native_devices, *chosen],
                    n_gpu_layers=n_gpu_layers,
                    split_mode=split_mode,
                    tensor_split=tensor_split,
                    exact=exact,
                    n_ctx=n_ctx,
                    n_batch=n_batch,
                    n_ubatch=min(n_ubatch, n_batch),
                    n_threads=n_threads or max(1, (os.cpu_count() or 1) // 2),
                )
        except BaseException:
            self.close()
            raise
        self.n_batch = n_batch
        self.n_past = 0
        """Tokens in the context."""

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Free context and model, and leave the servers this engine joined."""
        if self._context is not None:
            self._context.close()
        if self._model is not None:
            self._model.close()
        owned, self._owned = self._owned, []
        remote.close(owned)

    def _choose(self, names: Sequence[str] | None) -> list[int]:
        offered = {d.name.lower(): d.plugin.address for d in self.remote_devices}
        plain = (DeviceType.CPU, DeviceType.ACCEL)
        for device in list_devices(self._native):
            if device.type not in plain and device.name.lower() not in offered:
                offered[device.name.lower()] = device.address
        if names is None:
            return list(offered.values())
        missing = [name for name in names if name.lower() not in offered]
        if missing:
            known = ", ".join(offered) or "none"
            raise UsageError(f"no device named {missing[0]!r}; there are: {known}")
        return [offered[name.lower()] for name in names]

    def _load(
        self,
        path: Path,
        *,
        devices: list[int],
        n_gpu_layers: int,
        split_mode: str,
        tensor_split: Sequence[float],
        exact: bool,
        n_ctx: int,
        n_batch: int,
        n_ubatch: int,
        n_threads: int,
    ) -> None:
        try:
            self._model = NativeModel(
                self._native,
                path,
                devices=devices,
                n_gpu_layers=n_gpu_layers,
                split_mode=split_mode,
                tensor_split=tensor_split,
                use_extra_bufts=not exact,
                on_progress=self._progress,
            )
            self._context = NativeContext(
                self._model,
                n_ctx=n_ctx,
                n_batch=n_batch,
                n_ubatch=n_ubatch,
                n_threads=n_threads,
                flash_attention=split_mode == "tensor",
            )
        except CallFailed:
            # The reason is usually a worker's.
            self.check()
            raise
        self.check()

    def _progress(self, share: float) -> bool:
        if self._on_progress is not None:
            self._on_progress(share)
        return all(d.connection.healthy for d in self.remote_devices)

    @property
    def model(self) -> NativeModel:
        if self._model is None:
            raise UsageError("the engine is closed")
        return self._model

    @property
    def context(self) -> NativeContext:
        if self._context is None:
            raise UsageError("the engine is closed")
        return self._context

    def check(self) -> None:
        """Raise the failure of the first remote device that has one.

        Raises:
            RemoteError: names the endpoint, the command and the cause.
        """
        for device in self.remote_devices:
            device.connection.check()

    def tokenize(self, text: str, *, add_special: bool = True) -> list[int]:
        """The tokens of a text.

        Raises:
            UsageError: the model has no vocabulary.
        """
        if not self.model.has_vocabulary:
            raise UsageError(
                "the model has no vocabulary; give token numbers (--prompt-tokens)"
            )
        return self.model.tokenize(text, add_special)

    def chat_prompt(self, text: str) -> str:
        """A user's message in the model's chat template.

        Raises:
            UsageError: the model has no template that llama.cpp knows.
        """
        return self.model.chat_prompt([("user", text)])

    def reset(self) -> None:
        """Forget the context's tokens."""
        self.context.clear()
        self.n_past = 0
        self.check()

    def eval(self, tokens: Sequence[int]) -> npt.NDArray[Any]:
        """Append tokens to the context; returns the last one's logits.

        The array, `n_vocab` f32, is llama.cpp's own and valid until the next
        call.

        Raises:
            UsageError: no tokens, unknown ones, or more than the context holds.
            RemoteError: a worker failed. The engine is of no more use.
            CallFailed: llama.cpp failed by itself.
        """
        self._admit(tokens)
        for at in range(0, len(tokens), self.n_batch):
            status = self.context.decode(tokens[at : at + self.n_batch])
            if status != 0:
                self.check()
                raise CallFailed("llama_decode", f"status {status}")
        try:
            logits = self.context.logits()
        finally:
            self.check()
        self.n_past += len(tokens)
        return logits

    def _admit(self, tokens: Sequence[int]) -> None:
        if len(tokens) == 0:
            raise UsageError("the prompt is empty")
        if self.n_past + len(tokens) > self.context.n_ctx:
            raise UsageError(
                f"{self.n_past} + {len(tokens)} tokens do not fit the context "
                f"of {self.context.n_ctx}; raise it with -c"
            )
        n_vocab = self.model.n_vocab
        for token in tokens:
            if not 0 <= token < n_vocab:
                raise UsageError(f"token {token} is not below {n_vocab}")

    def generate(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = 128,
        sampling: Sampling | None = None,
        *,
        stop_at_end: bool = True,
    ) -> Generation:
        """Continue a prompt. Iterate over the result to run it.

        Starts from an empty context. With `stop_at_end` off, an end-of-text
        token does not end the generation.

        Raises:
            UsageError: a prompt that is empty or too long.
        """
        tokens = self.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        return Generation(self, tokens, max_tokens, sampling or Sampling(), stop_at_end)

    def greedy(self) -> int:
        """The token with the largest of the last logits."""
        return int(np.argmax(self.context.logits()))

    def save_state(self) -> bytes:
        """The context's whole state, KV cache included.

        Raises:
            RemoteError: a worker failed.
        """
        state = self.context.save_state()
        self.check()
        return self.n_past.to_bytes(8, "little") + state

    def load_state(self, state: bytes) -> None:
        """Go back to a state from `save_state`.

        Raises:
            CallFailed: it is of another model or other settings.
            RemoteError: a worker failed.
        """
        try:
            self.context.load_state(state[8:])
        finally:
            self.check()
        self.n_past = int.from_bytes(state[:8], "little")

    def report(self) -> list[DeviceReport]:
        """What each device holds: remote ones first, then this machine's."""
        reports = [
            DeviceReport(d.name, str(d.endpoint), self._layers_of(d), d.allocated)
            for d in self.remote_devices
        ]
        names = {d.name for d in self.remote_devices}
        layers = {k: v for k, v in self._placement.layers.items() if k not in names}
        sizes = self._local_sizes(names)
        for name in dict.fromkeys([*layers, *sizes]):
            reports.append(
                DeviceReport(
                    name, "local", len(layers.get(name, ())), sizes.get(name, 0)
                )
            )
        return reports

    def _layers_of(self, device: RemoteDevice) -> int:
        named = self._placement.layers.get(device.name)
        return len(device.layers if named is None else named)

    def _local_sizes(self, remote_names: set[str]) -> dict[str, int]:
        """Bytes by local device; the CPU's buffer types are one device."""
        sizes: dict[str, int] = {}
        for buffer_type, size in self._placement.sizes.items():
            device = "CPU" if buffer_type.startswith("CPU") else buffer_type
            if device not in remote_names:
                sizes[device] = sizes.get(device, 0) + size
        return sizes
