"""llama.cpp's model, context and sampler: objects that own the pointers."""

from __future__ import annotations

import ctypes as C
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from longwire.errors import CallFailed, UsageError
from longwire.native.abi import P
from longwire.native.engine import NativeEngine, log_listeners
from longwire.native.guard import callback, raise_kept
from longwire.native.llama import (
    TOKEN_DATA,
    ChatMessage,
    ProgressCallback,
    SamplerChainParams,
    TokenData,
    TokenDataArray,
)
from longwire.native.memory import array_at, view
from longwire.native.plugin import device_array

__all__ = [
    "FLASH_ATTENTION",
    "SPLIT_MODES",
    "NativeContext",
    "NativeModel",
    "NativeSampler",
    "Placement",
]

SPLIT_MODES = {"none": 0, "layer": 1, "tensor": 3}
"""`enum llama_split_mode`; row mode needs buffers that remote devices lack."""

_NO_VOCABULARY = 0

FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
"""`enum llama_flash_attn_type`."""


class Placement:
    """What llama.cpp says about where it put a model, read from its log.

    There is no call that tells. A build that words its log differently leaves
    these empty.
    """

    _LAYER = re.compile(r"layer\s+(\d+) assigned to device (.+?)(?:, is_swa|$)")
    _SIZE = re.compile(r"(\S+)\s+(?:model|KV|compute) buffer size\s*=\s*([\d.]+) MiB")

    _META = "Meta("

    def __init__(self) -> None:
        self.layers: dict[str, set[int]] = {}
        self.sizes: dict[str, int] = {}
        """Bytes per buffer type name."""
        self.error = ""
        """The last error llama.cpp logged: why a load failed."""
        self._thread = 0

    def read(self, level: int, line: str) -> None:
        """Take one log line, if this thread's load made it."""
        if threading.get_ident() != self._thread:
            return
        if level >= logging.ERROR:
            self.error = line.strip()
        if self._META in line:
            # A tensor split's stand-in for several devices, which say it again.
            return
        match = self._LAYER.search(line)
        if match:
            self.layers.setdefault(match[2], set()).add(int(match[1]))
            return
        match = self._SIZE.search(line)
        if match:
            size = int(float(match[2]) * (1 << 20))
            self.sizes[match[1]] = self.sizes.get(match[1], 0) + size

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Read the engine's log while the body runs."""
        self._thread = threading.get_ident()
        log_listeners.append(self.read)
        try:
            yield
        finally:
            log_listeners.remove(self.read)


class NativeModel:
    """A loaded model. `close` frees it; contexts must be closed before."""

    def __init__(
        self,
        engine: NativeEngine,
        path: Path,
        *,
        devices: Sequence[int],
        n_gpu_layers: int,
        split_mode: str,
        tensor_split: Sequence[float],
        use_extra_bufts: bool,
        on_progress: Callable[[float], bool],
    ) -> None:
        """Load `path` over `devices` (addresses of `ggml_backend_device`).

        `on_progress` gets the share that is loaded, 0 to 1, and may return
        False to stop.

        Raises:
            CallFailed: llama.cpp could not load it; its log says why.
        """
        library = engine.library
        self.engine = engine
        self._library = library
        array = device_array(devices)
        split = (C.c_float * max(len(tensor_split), library.llama_max_devices()))(
            *tensor_split
        )
        progress = ProgressCallback(
            callback(lambda share, _data: on_progress(share), False)
        )
        params = library.llama_model_default_params()
        params.devices = C.addressof(array)
        params.n_gpu_layers = n_gpu_layers
        params.split_mode = SPLIT_MODES[split_mode]
        params.tensor_split = C.addressof(split) if tensor_split else None
        params.use_extra_bufts = use_extra_bufts
        params.progress_callback = progress
        self._pointer: int | None = library.llama_model_load_from_file(
            os.fsencode(path), params
        )
        try:
            raise_kept()
        except BaseException:
            self.close()
            raise
        if not self._pointer:
            raise CallFailed("llama_model_load_from_file", f"cannot load {path}")
        self._vocab: int = library.llama_model_get_vocab(self._pointer)

    def close(self) -> None:
        """Free the model; idempotent."""
        pointer, self._pointer = self._pointer, None
        if pointer:
            self._library.llama_model_free(pointer)

    @property
    def pointer(self) -> int:
        if self._pointer is None:
            raise UsageError("the model is closed")
        return self._pointer

    @property
    def n_layer(self) -> int:
        return int(self._library.llama_model_n_layer(self.pointer))

    @property
    def size(self) -> int:
        """Bytes of all its tensors."""
        return int(self._library.llama_model_size(self.pointer))

    @property
    def n_vocab(self) -> int:
        return int(self._library.llama_vocab_n_tokens(self._vocab))

    @property
    def has_vocabulary(self) -> bool:
        """False for a model that knows token numbers only."""
        return int(self._library.llama_vocab_type(self._vocab)) != _NO_VOCABULARY

    def is_end(self, token: int) -> bool:
        """Whether this token ends a generation."""
        return self.has_vocabulary and bool(
            self._library.llama_vocab_is_eog(self._vocab, token)
        )

    def tokenize(self, text: str, add_special: bool = True) -> list[int]:
        """Tokens of a text; control tokens written out in it are understood."""
        try:
            raw = text.encode()
        except UnicodeEncodeError as error:
            raise UsageError("the prompt is not valid UTF-8 text") from error
        room = len(raw) + 16
        tokens = (C.c_int32 * room)()
        n = self._library.llama_tokenize(
            self._vocab, raw, len(raw), C.addressof(tokens), room, add_special, True
        )
        if n < 0:
            raise CallFailed("llama_tokenize", f"{-n} tokens from {len(raw)} bytes")
        return tokens[:n]

    def piece(self, token: int) -> bytes:
        """A token's bytes; a character may be spread over several tokens.

        Without a vocabulary there are none.
        """
        if not self.has_vocabulary:
            return b""
        room = 64
        while True:
            buffer = C.create_string_buffer(room)
            n = self._library.llama_token_to_piece(
                self._vocab, token, buffer, room, 0, False
            )
            if n >= 0:
                return buffer.raw[:n]
            room = -n

    def chat_prompt(self, messages: Sequence[tuple[str, str]]) -> str:
        """The (role, content) messages in the model's own chat template.

        Raises:
            UsageError: it has none, or one that llama.cpp's C API cannot apply.
        """
        template = self._library.llama_model_chat_template(self.pointer, None)
        if template is None:
            raise UsageError("the model has no chat template")
        array = (ChatMessage * len(messages))(
            *[ChatMessage(role.encode(), text.encode()) for role, text in messages]
        )
        room = 1024 + 2 * sum(len(text.encode()) for _, text in messages)
        while True:
            buffer = C.create_string_buffer(room)
            n = self._library.llama_chat_apply_template(
                template, array, len(messages), True, buffer, room
            )
            if n < 0:
                raise UsageError("llama.cpp does not know the model's chat template")
            if n <= room:
                return buffer.raw[:n].decode("utf-8", "replace")
            room = n


class NativeContext:
    """A context of a model: KV cache, compute buffers, the last logits."""

    def __init__(
        self,
        model: NativeModel,
        *,
        n_ctx: int,
        n_batch: int,
        n_ubatch: int,
        n_threads: int,
        flash_attention: str,
    ) -> None:
        """Raises: CallFailed: no memory, or settings the model cannot take."""
        library = model.engine.library
        self._library = library
        self._model = model
        params = library.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = n_batch
        params.n_ubatch = n_ubatch
        params.n_threads = params.n_threads_batch = n_threads
        params.flash_attn_type = FLASH_ATTENTION[flash_attention]
        self._pointer: int | None = library.llama_init_from_model(model.pointer, params)
        try:
            raise_kept()
        except BaseException:
            self.close()
            raise
        if not self._pointer:
            raise CallFailed("llama_init_from_model", "cannot create a context")
        self.n_ctx = int(library.llama_n_ctx(self._pointer))
        self.n_vocab = model.n_vocab

    def close(self) -> None:
        """Free the context; idempotent."""
        pointer, self._pointer = self._pointer, None
        if pointer:
            # A read that is still queued would land in memory that is gone.
            self._library.llama_synchronize(pointer)
            self._library.llama_free(pointer)

    @property
    def pointer(self) -> int:
        if self._pointer is None:
            raise UsageError("the context is closed")
        return self._pointer

    def decode(self, tokens: Sequence[int]) -> int:
        """Append tokens to the sequence; returns llama.cpp's status, 0 is good."""
        array = (C.c_int32 * len(tokens))(*tokens)
        batch = self._library.llama_batch_get_one(C.addressof(array), len(tokens))
        status = int(self._library.llama_decode(self.pointer, batch))
        raise_kept()
        return status

    def logits(self) -> npt.NDArray[Any]:
        """The last token's logits, `n_vocab` f32, valid until the next `decode`."""
        row = self._library.llama_get_logits_ith(self.pointer, -1)
        if not row:
            raise CallFailed("llama_get_logits_ith", "no logits")
        return array_at(row, self.n_vocab, "<f4")

    def synchronize(self) -> None:
        """Wait for everything that was started."""
        self._library.llama_synchronize(self.pointer)

    def clear(self) -> None:
        """Forget the sequence."""
        memory = self._library.llama_get_memory(self.pointer)
        self._library.llama_memory_clear(memory, True)

    def save_state(self) -> bytes:
        """The whole state, KV cache included, as bytes."""
        size = self._library.llama_state_get_size(self.pointer)
        state = np.zeros(size, np.uint8)
        n = self._library.llama_state_get_data(self.pointer, state.ctypes.data, size)
        return state[:n].tobytes()

    def load_state(self, state: bytes) -> None:
        """Go back to a saved state.

        Raises:
            CallFailed: it is of another model or other settings.
        """
        n = self._library.llama_state_set_data(
            self.pointer, C.cast(C.c_char_p(state), P), len(state)
        )
        if n != len(state):
            raise CallFailed("llama_state_set_data", "the state does not fit")


class NativeSampler:
    """A llama.cpp sampler chain: top-k, top-p, temperature, a seeded draw."""

    def __init__(
        self, engine: NativeEngine, top_k: int, top_p: float, temp: float, seed: int
    ) -> None:
        library = engine.library
        self._library = library
        self._pointer: int | None = library.llama_sampler_chain_init(
            SamplerChainParams(True)
        )
        for stage in (
            library.llama_sampler_init_top_k(top_k),
            library.llama_sampler_init_top_p(top_p, 1),
            library.llama_sampler_init_temp(temp),
            library.llama_sampler_init_dist(seed),
        ):
            # The chain owns its stages.
            library.llama_sampler_chain_add(self._pointer, stage)

    def sample(self, context: NativeContext) -> int:
        """Draw a token from the context's last logits."""
        return int(
            self._library.llama_sampler_sample(self._pointer, context.pointer, -1)
        )

    def sample_from(self, top: npt.NDArray[Any]) -> int:
        """Draw a token from entries of "index" and "value", the largest first.

        They must be as many as the chain's top-k leaves over, or more.
        """
        data = (TokenData * len(top))()
        entries = np.frombuffer(view(C.addressof(data), C.sizeof(data)), TOKEN_DATA)
        entries["id"], entries["logit"] = top["index"], top["value"]
        candidates = TokenDataArray(C.addressof(data), len(top), -1, True)
        self._library.llama_sampler_apply(self._pointer, C.addressof(candidates))
        chosen: int = TokenData.from_address(
            candidates.data + candidates.selected * C.sizeof(TokenData)
        ).id
        self._library.llama_sampler_accept(self._pointer, chosen)
        return chosen

    def close(self) -> None:
        """Free the chain; idempotent."""
        pointer, self._pointer = self._pointer, None
        if pointer:
            self._library.llama_sampler_free(pointer)
