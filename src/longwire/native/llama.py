"""llama.cpp's C API as the host uses it: parameter structs and functions.

Source: `include/llama.h`. The two engines differ in one field: builds from
b11549 on have `moe_cache_size` in `llama_context_params`.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Mapping
from typing import Any

import numpy as np

from longwire.native.abi import P, S
from longwire.native.library import Library, Signature

__all__ = [
    "Batch",
    "ContextParams",
    "ContextParamsMoe",
    "LlamaContextParams",
    "ModelParams",
    "ProgressCallback",
    "TOKEN_DATA",
    "TokenData",
    "TokenDataArray",
    "declare_llama",
]

ProgressCallback = C.CFUNCTYPE(C.c_bool, C.c_float, P)

_F = C.c_float
_U32 = C.c_uint32
_I32 = C.c_int32
_BOOL = C.c_bool


class ModelParams(C.Structure):
    """`struct llama_model_params`."""

    _fields_ = [
        ("devices", P),
        ("tensor_buft_overrides", P),
        ("n_gpu_layers", _I32),
        ("split_mode", C.c_int),
        ("load_mode", C.c_int),
        ("lazy_mode", C.c_int),
        ("main_gpu", _I32),
        ("tensor_split", P),
        ("progress_callback", ProgressCallback),
        ("progress_callback_user_data", P),
        ("kv_overrides", P),
        ("vocab_only", _BOOL),
        ("check_tensors", _BOOL),
        ("use_extra_bufts", _BOOL),
        ("no_host", _BOOL),
        ("no_alloc", _BOOL),
        ("load_mtp", _BOOL),
    ]


_Fields = list[tuple[str, Any]]

_CONTEXT_HEAD: _Fields = [
    ("n_ctx", _U32),
    ("n_batch", _U32),
    ("n_ubatch", _U32),
    ("n_seq_max", _U32),
    ("n_rs_seq", _U32),
    ("n_outputs_max", _U32),
    ("n_outputs_max_per_seq", _U32),
    ("n_threads", _I32),
    ("n_threads_batch", _I32),
    ("ctx_type", C.c_int),
    ("rope_scaling_type", C.c_int),
    ("pooling_type", C.c_int),
    ("attention_type", C.c_int),
    ("flash_attn_type", C.c_int),
    ("rope_freq_base", _F),
    ("rope_freq_scale", _F),
    ("yarn_ext_factor", _F),
    ("yarn_attn_factor", _F),
    ("yarn_beta_fast", _F),
    ("yarn_beta_slow", _F),
    ("yarn_orig_ctx", _U32),
    ("defrag_thold", _F),
    ("cb_eval", P),
    ("cb_eval_user_data", P),
    ("type_k", C.c_int),
    ("type_v", C.c_int),
]

_CONTEXT_TAIL: _Fields = [
    ("abort_callback", P),
    ("abort_callback_data", P),
    ("embeddings", _BOOL),
    ("offload_kqv", _BOOL),
    ("no_perf", _BOOL),
    ("op_offload", _BOOL),
    ("swa_full", _BOOL),
    ("kv_unified", _BOOL),
    ("samplers", P),
    ("n_samplers", S),
    ("ctx_other", P),
]


class ContextParams(C.Structure):
    """`struct llama_context_params` up to b11434."""

    _fields_ = [*_CONTEXT_HEAD, *_CONTEXT_TAIL]


class ContextParamsMoe(C.Structure):
    """`struct llama_context_params` of b11549."""

    _fields_ = [*_CONTEXT_HEAD, ("moe_cache_size", S), *_CONTEXT_TAIL]


LlamaContextParams = type[ContextParams] | type[ContextParamsMoe]


class Batch(C.Structure):
    """`struct llama_batch`."""

    _fields_ = [
        ("n_tokens", _I32),
        ("token", P),
        ("embd", P),
        ("pos", P),
        ("n_seq_id", P),
        ("seq_id", P),
        ("logits", P),
    ]


class SamplerChainParams(C.Structure):
    """`struct llama_sampler_chain_params`."""

    _fields_ = [("no_perf", _BOOL)]


class TokenData(C.Structure):
    """`struct llama_token_data`."""

    _fields_ = [("id", _I32), ("logit", _F), ("p", _F)]


TOKEN_DATA = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])
"""`TokenData` for arrays."""


class TokenDataArray(C.Structure):
    """`struct llama_token_data_array`."""

    _fields_ = [("data", P), ("size", S), ("selected", C.c_int64), ("sorted", _BOOL)]


class ChatMessage(C.Structure):
    """`struct llama_chat_message`."""

    _fields_ = [("role", C.c_char_p), ("content", C.c_char_p)]


_FUNCTIONS: Mapping[str, Signature] = {
    "llama_backend_init": (None,),
    "llama_log_set": (None, P, P),
    "llama_max_devices": (S,),
    "llama_model_default_params": (ModelParams,),
    "llama_model_load_from_file": (P, C.c_char_p, ModelParams),
    "llama_model_free": (None, P),
    "llama_model_get_vocab": (P, P),
    "llama_model_n_layer": (_I32, P),
    "llama_model_size": (C.c_uint64, P),
    "llama_model_chat_template": (C.c_char_p, P, C.c_char_p),
    "llama_vocab_type": (C.c_int, P),
    "llama_vocab_n_tokens": (_I32, P),
    "llama_vocab_is_eog": (_BOOL, P, _I32),
    "llama_tokenize": (_I32, P, C.c_char_p, _I32, P, _I32, _BOOL, _BOOL),
    "llama_token_to_piece": (_I32, P, _I32, C.c_char_p, _I32, _I32, _BOOL),
    "llama_chat_apply_template": (
        _I32,
        C.c_char_p,
        C.POINTER(ChatMessage),
        S,
        _BOOL,
        C.c_char_p,
        _I32,
    ),
    "llama_free": (None, P),
    "llama_n_ctx": (_U32, P),
    "llama_get_memory": (P, P),
    "llama_memory_clear": (None, P, _BOOL),
    "llama_state_get_size": (S, P),
    "llama_state_get_data": (S, P, P, S),
    "llama_state_set_data": (S, P, P, S),
    "llama_batch_get_one": (Batch, P, _I32),
    "llama_decode": (_I32, P, Batch),
    "llama_synchronize": (None, P),
    "llama_get_logits_ith": (P, P, _I32),
    "llama_sampler_chain_init": (P, SamplerChainParams),
    "llama_sampler_chain_add": (None, P, P),
    "llama_sampler_init_top_k": (P, _I32),
    "llama_sampler_init_top_p": (P, _F, S),
    "llama_sampler_init_temp": (P, _F),
    "llama_sampler_init_dist": (P, _U32),
    "llama_sampler_sample": (_I32, P, P, _I32),
    "llama_sampler_apply": (None, P, P),
    "llama_sampler_accept": (None, P, _I32),
    "llama_sampler_free": (None, P),
}


def declare_llama(library: Library, context_params: LlamaContextParams) -> None:
    """Make llama.cpp's functions callable on `library`, with its parameter layout."""
    library.declare(_FUNCTIONS)
    library.declare(
        {
            "llama_context_default_params": (context_params,),
            "llama_init_from_model": (P, P, context_params),
        }
    )
