"""`Engine`: a model laid out over devices, ready to generate."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from longwire.client import remote
from longwire.client.connection import Connection
from longwire.client.credentials import Credentials
from longwire.client.device import RemoteDevice
from longwire.client.health import Deadlines, Health
from longwire.client.reduction import Reduction, reduced
from longwire.client.uploader import Delivery
from longwire.errors import CallFailed, RemoteError, UsageError
from longwire.host.generation import Generation
from longwire.host.layout import DeviceReport, Layout, LoadedModel
from longwire.host.sampling import Sampling
from longwire.host.tracing import Tracing
from longwire.native.compute import default_threads
from longwire.native.engine import load_engine
from longwire.native.model import NativeContext, NativeModel, NativeSampler
from longwire.native.profiles import DEFAULT_ENGINE
from longwire.transport.endpoint import parse_endpoints
from longwire.wire.lx import TOP_MOST

__all__ = ["ON_FAILURE", "DeviceReport", "Engine"]

_log = logging.getLogger("longwire.host")

ON_FAILURE = ("fail", "resume")
"""What to do when a worker is lost."""

_LAYOUTS = 8
"""Layouts in a row that may fail before an engine gives up."""


class _Connecting(TypedDict):
    engine: str
    credentials: Credentials | None
    deadlines: Deadlines | None


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
        flash_attention: str = "auto",
        spares: str = "",
        on_failure: str = "fail",
        credentials: Credentials | None = None,
        deadlines: Deadlines | None = None,
        on_progress: Callable[[float], None] | None = None,
        on_delivery: Callable[[Sequence[Delivery]], None] | None = None,
    ) -> None:
        """Load `model`.

        `rpc` are endpoints, whose connections this engine then owns, or
        devices from `longwire.connect`. `devices` picks among remote and local
        ones by name, in that order; without it all are used. `native_devices`
        are addresses of further `ggml_backend_device`s, put in front.
        `exact` keeps the host from repacking weights, so that results equal a
        local `exact` run bit for bit. With `on_failure="resume"` a generation
        outlives its workers: the model is laid out again over those that are
        left and the `spares` (endpoints), and the text goes on. `credentials`
        and `deadlines` are for the endpoints that this engine connects to.

        `on_progress` is told the share of the model that is where it belongs, 0 to
        1, and `on_delivery` what each worker has; both in this thread, the first
        load only.

        Raises:
            UsageError: settings that cannot be.
            RemoteError: an endpoint failed, while connecting or loading.
            NativeError: the engine, the model or the context cannot be loaded.
        """
        if on_failure not in ON_FAILURE:
            known = " or ".join(ON_FAILURE)
            raise UsageError(f"on_failure is {on_failure!r}, not {known}")
        self._resumes = on_failure == "resume"
        self._spares = parse_endpoints(spares) if spares else []
        self._connecting: _Connecting = {
            "engine": engine,
            "credentials": credentials,
            "deadlines": deadlines,
        }
        self._layout = Layout(
            model=Path(model),
            devices=devices,
            native_devices=native_devices,
            n_gpu_layers=n_gpu_layers,
            split_mode=split_mode,
            tensor_split=tensor_split,
            n_ctx=n_ctx,
            n_batch=n_batch,
            n_ubatch=min(n_ubatch, n_batch),
            n_threads=n_threads or default_threads(),
            exact=exact,
            flash_attention=flash_attention,
        )
        self._native = load_engine(engine)
        self._loaded: LoadedModel | None = None
        self._joined: list[Connection] = []
        """Connections to leave at the end."""
        if isinstance(rpc, str):
            rpc = remote.connect(rpc, **self._connecting) if rpc else []
            self._joined = _connections(rpc)
        self._endpoints = list(dict.fromkeys(device.endpoint for device in rpc))
        self.n_past = 0
        """Tokens in the context."""
        self.tracing: Tracing | None = None
        """Where generations are drawn, if they are."""
        self._reduction: Reduction | None = None
        try:
            try:
                self._loaded = LoadedModel(
                    self._native, self._layout, rpc, on_progress, on_delivery
                )
            except RemoteError as error:
                self.recover(error)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Free context and model, and leave the servers this engine joined."""
        self._forget_logits()
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            loaded.close()
        joined, self._joined = self._joined, []
        remote.release(joined)

    def recover(self, error: RemoteError) -> None:
        """Lay the model out again over the workers that still answer.

        The context is empty afterwards. With no worker left, the model runs on
        this machine alone.

        Raises:
            RemoteError: `error` itself, if this engine does not resume; another
                one, if the workers that are left fail as well.
            UsageError: the model cannot be split by tensors over those left.
            NativeError: the model does not fit on what is left.
        """
        if not self._resumes:
            raise error
        for _ in range(_LAYOUTS):
            started = time.perf_counter()
            try:
                living = self._lay_out_again()
            except RemoteError as another:
                _log.warning("%s; and %s", error, another)
                error = another
                continue
            except UsageError as reason:
                raise UsageError(f"{error}; and over what is left {reason}") from error
            _log.warning(
                "%s; laid out again over %s in %.1f s",
                error,
                ", ".join(living) or "this machine alone",
                time.perf_counter() - started,
            )
            return
        raise error

    def _lay_out_again(self) -> list[str]:
        """Load over all workers and spares that answer; returns their endpoints."""
        self._forget_logits()
        before = [] if self._loaded is None else self._loaded.remote_devices
        if self._loaded is not None:
            loaded, self._loaded = self._loaded, None
            loaded.close()
        found = remote.try_connect(
            [*self._endpoints, *self._spares], **self._connecting
        )
        devices = [d for r in found.values() if isinstance(r, list) for d in r]
        joined, self._joined = self._joined, _connections(devices)
        remote.release(joined)
        layout = self._layout
        if devices != before:
            # Names and shares were given for devices that are not all there.
            layout = replace(layout, tensor_split=(), devices=None)
        if not devices:
            # There is nothing to split over; shares of this machine alone are its own.
            layout = replace(layout, split_mode="layer")
        self._loaded = LoadedModel(self._native, layout, devices)
        self.n_past = 0
        return [str(e) for e, result in found.items() if isinstance(result, list)]

    @property
    def loaded(self) -> LoadedModel:
        """The model as it is laid out now."""
        if self._loaded is None:
            raise UsageError("the engine is closed")
        return self._loaded

    @property
    def model(self) -> NativeModel:
        return self.loaded.model

    @property
    def context(self) -> NativeContext:
        return self.loaded.context

    @property
    def remote_devices(self) -> list[RemoteDevice]:
        return self.loaded.remote_devices

    def check(self) -> None:
        """Raise the failure of the first remote device that has one.

        Raises:
            RemoteError: names the endpoint, the command and the cause.
        """
        self.loaded.check()

    def health(self) -> list[Health]:
        """How each worker is: asked now, unless it has failed before."""
        return [c.health() for c in _connections(self.remote_devices)]

    def report(self) -> list[DeviceReport]:
        """What each device holds: remote ones first, then this machine's."""
        return self.loaded.report()

    def tokenize(self, text: str, *, add_special: bool = True) -> list[int]:
        """The tokens of a text.

        Raises:
            UsageError: the model has no vocabulary.
        """
        if not self.model.has_vocabulary:
            raise UsageError(
                "the model has no vocabulary; give token numbers instead of text"
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
        self._forget_logits()
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
        self.advance(tokens)
        return self._logits()

    def _logits(self) -> npt.NDArray[Any]:
        try:
            self._last_step().whole()
            return self.context.logits()
        finally:
            self.check()

    def advance(self, tokens: Sequence[int], entries: int | None = None) -> None:
        """Append tokens to the context, for `choose` to go on from.

        With `entries`, that many of the last one's largest logits are all that need
        come from a worker: what decides on the next token (`Sampling.entries`), without
        the row.

        Raises:
            UsageError: no tokens, unknown ones, or more than the context holds.
            RemoteError: a worker failed. The engine is of no more use.
            CallFailed: llama.cpp failed by itself.
        """
        self._admit(tokens, self.n_past)
        self._forget_logits()
        reduction = Reduction(self.model.n_vocab, entries or 0)
        wanted = entries is not None and 0 < entries <= TOP_MOST
        with reduced(reduction if wanted else None):
            self._decode(tokens)
            self.context.synchronize()
        self.check()
        self._reduction = reduction

    def _forget_logits(self) -> None:
        """What is known of them is of another step, or of a context that is gone."""
        self._reduction = None

    def _last_step(self) -> Reduction:
        if self._reduction is None:
            raise UsageError("there are no logits to choose from: advance first")
        return self._reduction

    def choose(self, sampler: NativeSampler | None = None) -> int:
        """The next token, by a sampler, or the one with the largest logit.

        Raises:
            UsageError: there was no `advance` or `eval` since the context changed.
            RemoteError: a worker failed.
        """
        step = self._last_step()
        if sampler is None:
            best = step.best()
            return int(np.argmax(self._logits())) if best is None else best
        top = step.top()
        if top is not None:
            return sampler.sample_from(top)
        self._logits()
        return sampler.sample(self.context)

    def _decode(self, tokens: Sequence[int]) -> None:
        for at in range(0, len(tokens), self._layout.n_batch):
            batch = tokens[at : at + self._layout.n_batch]
            status = self.context.decode(batch)
            if status != 0:
                self.check()
                raise CallFailed("llama_decode", f"status {status}")
            self.n_past += len(batch)

    def _admit(self, tokens: Sequence[int], n_past: int) -> None:
        if len(tokens) == 0:
            raise UsageError("the prompt is empty")
        if n_past + len(tokens) > self.context.n_ctx:
            raise UsageError(
                f"{n_past} + {len(tokens)} tokens do not fit the context "
                f"of {self.context.n_ctx}; ask for a larger one (n_ctx, -c)"
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
        self._admit(tokens, n_past=0)
        return Generation(self, tokens, max_tokens, sampling or Sampling(), stop_at_end)

    def save_state(self) -> bytes:
        """The context's whole state, KV cache included.

        Raises:
            RemoteError: a worker failed.
        """
        state = self.context.save_state()
        self.check()
        return self.n_past.to_bytes(8, "little") + state

    def load_state(self, state: bytes) -> None:
        """Go back to a state from `save_state`: it holds no logits.

        Raises:
            CallFailed: it is of another model or other settings.
            RemoteError: a worker failed.
        """
        self._forget_logits()
        try:
            self.context.load_state(state[8:])
        finally:
            self.check()
        self.n_past = int.from_bytes(state[:8], "little")


def _connections(devices: Sequence[RemoteDevice]) -> list[Connection]:
    return list(dict.fromkeys(device.connection for device in devices))
