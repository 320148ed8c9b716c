"""Struct layouts against a C compiler, and against the numbers written down."""

from __future__ import annotations

import ctypes as C
import re
import shutil
import subprocess
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest

from longwire.native import abi, llama

BUFFER_TYPE_SLOTS = (
    "get_name alloc_buffer alloc_buffer_n get_alignment get_max_size get_alloc_size "
    "get_alloc_size_n is_host"
)
BUFFER_SLOTS = (
    "free_buffer get_base init_tensor memset_tensor set_tensor get_tensor "
    "set_tensor_2d get_tensor_2d cpy_tensor clear reset"
)
BACKEND_SLOTS = (
    "get_name free set_tensor_async get_tensor_async set_tensor_2d_async "
    "get_tensor_2d_async cpy_tensor_async synchronize graph_plan_create "
    "graph_plan_free graph_plan_update graph_plan_compute graph_compute "
    "event_record event_wait graph_optimize"
)
DEVICE_SLOTS = (
    "get_name get_description get_memory get_type get_props init_backend "
    "get_buffer_type get_host_buffer_type buffer_from_host_ptr supports_op "
    "supports_buft offload_op event_new event_free event_synchronize"
)
REG_SLOTS = "get_name get_device_count get_device get_proc_address"


def pointers(names: str) -> str:
    return " ".join(f"void *{name};" for name in names.split())


def slots(names: str) -> str:
    return " ".join(f"void (*{name})(void);" for name in names.split())


CONTEXT_HEAD = (
    "uint32_t n_ctx; uint32_t n_batch; uint32_t n_ubatch; uint32_t n_seq_max; "
    "uint32_t n_rs_seq; uint32_t n_outputs_max; uint32_t n_outputs_max_per_seq; "
    "int32_t n_threads; int32_t n_threads_batch; int ctx_type; "
    "int rope_scaling_type; int pooling_type; int attention_type; "
    "int flash_attn_type; float rope_freq_base; float rope_freq_scale; "
    "float yarn_ext_factor; float yarn_attn_factor; float yarn_beta_fast; "
    "float yarn_beta_slow; uint32_t yarn_orig_ctx; float defrag_thold; "
    "void *cb_eval; void *cb_eval_user_data; int type_k; int type_v; "
)
CONTEXT_TAIL = (
    "void *abort_callback; void *abort_callback_data; bool embeddings; "
    "bool offload_kqv; bool no_perf; bool op_offload; bool swa_full; "
    "bool kv_unified; void *samplers; size_t n_samplers; void *ctx_other;"
)

# Fields in the documented order. Enums are ints; what a pointer points to does
# not change a layout.
DECLARATIONS: dict[str, str] = {
    "tensor": "int type; void *buffer; int64_t ne[4]; size_t nb[4]; int op; "
    "int32_t op_params[16]; int32_t flags; void *src[10]; void *view_src; "
    "size_t view_offs; void *data; char name[64]; void *extra; char padding[8];",
    "init_params": "size_t mem_size; void *mem_buffer; bool no_alloc;",
    "hash_set": "size_t size; uint32_t *used; void **keys;",
    "cgraph": "int size; int n_nodes; int n_leafs; "
    + pointers("nodes grads grad_accs leafs use_counts")
    + " struct hash_set visited_hash_set; int order; uint64_t uid;",
    "buffer_type_i_2": slots(
        BUFFER_TYPE_SLOTS.replace("alloc_buffer_n ", "").replace(
            "get_alloc_size_n ", ""
        )
    ),
    "buffer_type_i_3": slots(BUFFER_TYPE_SLOTS),
    "buffer_type_2": "struct buffer_type_i_2 iface; void *device; void *context;",
    "buffer_type_3": "struct buffer_type_i_3 iface; void *device; void *context;",
    "buffer_i": slots(BUFFER_SLOTS),
    "buffer": "struct buffer_i iface; void *buft; void *context; size_t size; "
    "int usage;",
    "backend_i": slots(BACKEND_SLOTS),
    "backend": "void *guid; struct backend_i iface; void *device; void *context;",
    "event": "void *device; void *context;",
    "device_i": slots(DEVICE_SLOTS),
    "device": "struct device_i iface; void *reg; void *context;",
    "reg_i": slots(REG_SLOTS),
    "reg": "int api_version; struct reg_i iface; void *context;",
    "dev_caps": "bool async; bool host_buffer; bool buffer_from_host_ptr; "
    "bool events; bool mmap_support;",
    "dev_props": "void *name; void *description; size_t memory_free; "
    "size_t memory_total; int type; void *device_id; struct dev_caps caps;",
    "model_params": "void *devices; void *tensor_buft_overrides; "
    "int32_t n_gpu_layers; int split_mode; int load_mode; int lazy_mode; "
    "int32_t main_gpu; void *tensor_split; void *progress_callback; "
    "void *progress_callback_user_data; void *kv_overrides; bool vocab_only; "
    "bool check_tensors; bool use_extra_bufts; bool no_host; bool no_alloc; "
    "bool load_mtp;",
    "context_params": CONTEXT_HEAD + CONTEXT_TAIL,
    "context_params_moe": CONTEXT_HEAD + "size_t moe_cache_size; " + CONTEXT_TAIL,
    "batch": "int32_t n_tokens; " + pointers("token embd pos n_seq_id seq_id logits"),
    "sampler_chain_params": "bool no_perf;",
    "chat_message": "char *role; char *content;",
}

OURS: dict[str, Any] = {
    "tensor": abi.GGML_TENSOR,
    "init_params": abi.InitParams,
    "hash_set": abi.HashSet,
    "cgraph": abi.Cgraph,
    "buffer_type_2": abi.BufferType2,
    "buffer_type_3": abi.BufferType3,
    "buffer_i": abi.BufferInterface,
    "buffer": abi.Buffer,
    "backend": abi.Backend,
    "event": abi.Event,
    "device": abi.Device,
    "reg": abi.Reg,
    "dev_props": abi.DeviceProps,
    "model_params": llama.ModelParams,
    "context_params": llama.ContextParams,
    "context_params_moe": llama.ContextParamsMoe,
    "batch": llama.Batch,
    "sampler_chain_params": llama.SamplerChainParams,
    "chat_message": llama.ChatMessage,
}

SIZE = "sizeof"
Layout = dict[str, int]

# The numbers of ggml's structs on 64-bit targets, as they were measured once.
WRITTEN_DOWN = {
    "tensor": "sizeof 336 type 0 buffer 8 ne 16 nb 48 op 80 op_params 84 flags 148 "
    "src 152 view_src 232 view_offs 240 data 248 name 256 extra 320",
    "init_params": "sizeof 24 mem_size 0 mem_buffer 8 no_alloc 16",
    "hash_set": "sizeof 24 size 0 used 8 keys 16",
    "cgraph": "sizeof 96 size 0 n_nodes 4 n_leafs 8 nodes 16 grads 24 grad_accs 32 "
    "leafs 40 use_counts 48 visited_hash_set 56 order 80 uid 88",
    "buffer_type_2": "sizeof 64 get_name 0 alloc_buffer 8 get_alignment 16 "
    "get_max_size 24 get_alloc_size 32 is_host 40 device 48 context 56",
    "buffer_type_3": "sizeof 80 get_name 0 alloc_buffer 8 alloc_buffer_n 16 "
    "get_alignment 24 get_max_size 32 get_alloc_size 40 get_alloc_size_n 48 "
    "is_host 56 device 64 context 72",
    "buffer_i": "sizeof 88 free_buffer 0 get_base 8 init_tensor 16 memset_tensor 24 "
    "set_tensor 32 get_tensor 40 set_tensor_2d 48 get_tensor_2d 56 cpy_tensor 64 "
    "clear 72 reset 80",
    "buffer": "sizeof 120 iface 0 buft 88 context 96 size 104 usage 112",
    "backend": "sizeof 152 guid 0 get_name 8 free 16 set_tensor_async 24 "
    "get_tensor_async 32 set_tensor_2d_async 40 get_tensor_2d_async 48 "
    "cpy_tensor_async 56 synchronize 64 graph_plan_create 72 graph_plan_free 80 "
    "graph_plan_update 88 graph_plan_compute 96 graph_compute 104 event_record 112 "
    "event_wait 120 graph_optimize 128 device 136 context 144",
    "event": "sizeof 16 device 0 context 8",
    "device": "sizeof 136 get_name 0 get_description 8 get_memory 16 get_type 24 "
    "get_props 32 init_backend 40 get_buffer_type 48 get_host_buffer_type 56 "
    "buffer_from_host_ptr 64 supports_op 72 supports_buft 80 offload_op 88 "
    "event_new 96 event_free 104 event_synchronize 112 reg 120 context 128",
    "reg": "sizeof 48 api_version 0 get_name 8 get_device_count 16 get_device 24 "
    "get_proc_address 32 context 40",
    "dev_props": "sizeof 56 name 0 description 8 memory_free 16 memory_total 24 "
    "type 32 device_id 40 async_ 48 host_buffer 49 buffer_from_host_ptr 50 "
    "events 51 mmap_support 52",
}

# Result first. p pointer, s text, z size_t, i int or enum, b bool, u u8, v nothing.
SIGNATURES: dict[str, tuple[Mapping[str, Any], str]] = {
    "buffer_type": (
        abi.BUFT_I,
        "pp ppz pppi zp zp zpp zppi bp",
    ),
    "buffer": (
        abi.BUFFER_I,
        "vp pp ipp vppuzz vpppzz vpppzz vpppzzzzz vpppzzzzz bppp vpu vp",
    ),
    "backend": (
        abi.BACKEND_I,
        "pp vp vpppzz vpppzz vpppzzzzz vpppzzzzz bpppp vp ppp vpp vppp ipp ipp vpp vpp "
        "vppp",
    ),
    "device": (
        abi.DEVICE_I,
        "pp pp vppp ip vpp ppp pp pp pppzz bpp bpp bpp pp vpp vpp",
    ),
    "reg": (abi.REG_I, "pp zp ppz pps"),
    "comm": (abi.COMM, "ppz vp bpp"),
}
CODES = {
    C.c_void_p: "p",
    C.c_char_p: "s",
    C.c_size_t: "z",
    C.c_int: "i",
    C.c_bool: "b",
    C.c_uint8: "u",
    None: "v",
}


def ours(name: str) -> Layout:
    """Size and field offsets of our struct."""
    struct: Any = OURS[name]
    if name == "tensor":
        offsets = {field: struct.fields[field][1] for field in struct.names}
        return {SIZE: struct.itemsize, **offsets}
    offsets = {field: getattr(struct, field).offset for field, *_ in struct._fields_}
    return {SIZE: C.sizeof(struct), **offsets}


def declared(name: str, prefix: str = "") -> dict[str, str]:
    """The fields of a declaration, and how C spells the way to each.

    A table of slots, or of capabilities, is written out in ours.
    """
    found = {}
    for line in filter(None, map(str.strip, DECLARATIONS[name].split(";"))):
        match = re.fullmatch(r"(.*?)\W*(\w+)(\[\d+\]|\)\(void\))?", line)
        assert match, line
        kind, field = match[1].removeprefix("struct "), match[2]
        if kind.endswith(("_i", "_i_2", "_i_3", "_caps")) and name != "buffer":
            found.update(declared(kind, f"{field}."))
        elif field != "padding":
            found[{"async": "async_"}.get(field, field)] = prefix + field
    return found


def probe() -> str:
    """A C program that prints `struct field number` lines."""
    structs = [f"struct {name} {{ {body} }};" for name, body in DECLARATIONS.items()]
    prints = []
    for name in OURS:
        prints.append(f'printf("{name} {SIZE} %zu\\n", sizeof(struct {name}));')
        for field, path in declared(name).items():
            offset = f"offsetof(struct {name}, {path})"
            prints.append(f'printf("{name} {field} %zu\\n", {offset});')
    headers = "stdbool stddef stdint stdio".split()
    return "\n".join(
        [
            *[f"#include <{header}.h>" for header in headers],
            *structs,
            "int main(void) {",
            *prints,
            "return 0; }",
        ]
    )


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Layout]:
    """Layouts by struct name, as the C compiler of this machine sees them."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler (cc, gcc or clang)")
    folder = tmp_path_factory.mktemp("probe")
    source, program = folder / "probe.c", folder / "probe"
    source.write_text(probe())
    subprocess.run([compiler, "-o", program, source], check=True, timeout=60)
    return read_layouts(program)


def read_layouts(program: Path) -> dict[str, Layout]:
    output = subprocess.run(
        [program], check=True, timeout=60, capture_output=True, text=True
    ).stdout
    layouts: dict[str, Layout] = {}
    for line in output.splitlines():
        struct, field, number = line.split()
        layouts.setdefault(struct, {})[field] = int(number)
    return layouts


@pytest.mark.parametrize("name", OURS)
def test_the_compiler_agrees(compiled: dict[str, Layout], name: str) -> None:
    assert ours(name) == compiled[name]


@pytest.mark.parametrize("name", WRITTEN_DOWN)
def test_the_written_numbers_agree(name: str) -> None:
    words = WRITTEN_DOWN[name].split()
    numbers = zip(words[::2], map(int, words[1::2]), strict=True)
    assert ours(name) == dict(numbers)


def test_the_context_parameters_differ_by_one_field() -> None:
    plain, moe = ours("context_params"), ours("context_params_moe")
    assert moe.pop("moe_cache_size") == plain["abort_callback"]
    at = list(plain).index("abort_callback")
    assert [moe[field] - plain[field] for field in list(plain)[1:at]] == [0] * (at - 1)
    assert [moe[field] - plain[field] for field in list(plain)[at:]] == [8] * 11
    assert moe[SIZE] - plain[SIZE] == 8


@pytest.mark.parametrize("name", SIGNATURES)
def test_slots_have_the_documented_signatures(name: str) -> None:
    table, signatures = SIGNATURES[name]
    found = [
        CODES[slot._restype_] + "".join(CODES[kind] for kind in slot._argtypes_)
        for slot in table.values()
    ]
    assert found == signatures.split()


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        (abi.Status, {"ALLOC_FAILED": -2, "FAILED": -1, "SUCCESS": 0, "ABORTED": 1}),
        (abi.DeviceType, {"CPU": 0, "GPU": 1, "IGPU": 2, "ACCEL": 3, "META": 4}),
        (abi.Usage, {"ANY": 0, "WEIGHTS": 1, "COMPUTE": 2}),
    ],
)
def test_enums(kind: type[IntEnum], numbers: dict[str, int]) -> None:
    assert {member.name: member.value for member in kind} == numbers
