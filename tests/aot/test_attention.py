"""The attention kernels compile for every target, and work in registers."""

import re

import pytest
import torch
import triton

from echokernels._path import forced_path
from echokernels._target import KNOWN_TARGETS
from echokernels.attention import prefill_hopper
from tests.aot.harness import (
    TARGETS,
    compile_op,
    local_memory,
    loops,
    meta,
    product_loop,
    spills_in_loops,
)

# 80 is padded to 128 and 192 to 256.
HEAD_DIMS = [64, 80, 128, 192, 256]


def index(*shape):
    return meta(*shape, dtype=torch.int32)


def features(heads, *, window=-1, softcap=0.0, biased=False):
    slopes = meta(heads, dtype=torch.float32) if biased else None
    sinks = meta(heads, dtype=torch.bfloat16) if biased else None
    return 0.125, True, window, -1, softcap, slopes, sinks


def assert_in_registers(kernels, target, parked=0):
    """parked: bytes of local memory that are allowed on sm_90."""
    # ptxas parks a few addresses of the epilogue during the loops; on sm_100 loops cannot be told
    # apart, for waits stand behind the end and jump back.
    for kernel in kernels:
        if target.startswith("sm_"):
            allowed = parked if target == "sm_90" else 32
            assert local_memory(kernel) <= allowed, f"{kernel.name} spills"
        if target == "sm_80":
            assert not spills_in_loops(kernel), f"{kernel.name} spills in a loop"


def assert_attends_in_registers(kernels, target):
    """What belongs to a sequence may be parked while its keys go by."""
    for kernel in kernels:
        if target.startswith("sm_"):
            assert local_memory(kernel) <= 512, f"{kernel.name} spills"
        if target in ("sm_80", "sm_90") and "mma" in kernel.asm["ptx"]:
            spills = [line for line in product_loop(kernel) if re.search(r"\b(LDL|STL)\b", line)]
            assert not spills, f"{kernel.name} spills while it attends"


def prefill_args(head_dim, dtype, tokens, *, page_size=0, group=4, codes=None, **options):
    q = meta(tokens, 2 * group, head_dim, dtype=dtype)
    if page_size:
        k = meta(64, page_size, 2, head_dim, dtype=codes or dtype)
        keys = (k, k, index(3), None, index(2), index(2, 9))
    else:
        k = meta(tokens, 2, head_dim, dtype=dtype)
        keys = (k, k, index(3), index(3), None, None)
    lse = meta(2 * group, tokens, dtype=torch.float32)
    scale = meta(64, page_size, 2, dtype=torch.float32) if codes else None
    return (q, lse, q, *keys, tokens, 4096, *features(2 * group, **options), scale, scale)


def decode_args(
    head_dim, dtype, *, queries=1, num_splits=0, group=4, page_size=16, codes=None, **options
):
    tokens = 3 * queries
    q = meta(tokens, 2 * group, head_dim, dtype=dtype)
    k = meta(64, page_size, 2, head_dim, dtype=codes or dtype)
    scale = meta(64, page_size, 2, dtype=torch.float32) if codes else None
    lse = meta(2 * group, tokens, dtype=torch.float32)
    boundaries = index(4) if queries > 1 else None
    return (
        q, lse, q, k, k, index(3, 512), index(3), boundaries, queries,
        *features(2 * group, **options), scale, scale,
        num_splits, 0, None,
    )  # fmt: skip


def compile_portable(target, *args, op="flash_attn_varlen"):
    with forced_path("portable"):
        return compile_op(op, target, *args)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("page_size", [0, 16])
def test_flash_attn_varlen(target, head_dim, page_size):
    args = prefill_args(head_dim, torch.bfloat16, 4096, page_size=page_size)
    # Some tiles of 128 rows fill the registers, and are faster than smaller ones all the same.
    full = head_dim > 128 or (page_size and head_dim > 64)
    assert_in_registers(compile_portable(target, *args), target, parked=96 if full else 0)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("tokens", [1, 8])  # tiles of 16 and 32 rows
def test_flash_attn_varlen_of_short_chunks(target, tokens):
    args = prefill_args(128, torch.bfloat16, tokens, page_size=16)
    assert_in_registers(compile_portable(target, *args), target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize(
    "variant",
    [
        {"dtype": torch.float16, "window": 100, "softcap": 30.0},
        {"dtype": torch.bfloat16, "biased": True},
        {"dtype": torch.float32},
        {"dtype": torch.bfloat16, "page_size": 1, "group": 5},
    ],
    ids=["window-softcap", "alibi-sinks", "fp32", "page-1-group-5"],
)
def test_flash_attn_varlen_variants(target, head_dim, variant):
    variant = dict(variant)
    args = prefill_args(head_dim, variant.pop("dtype"), 4096, **variant)
    parked = 96 if head_dim == 256 and args[0].dtype != torch.float32 else 0
    assert_in_registers(compile_portable(target, *args), target, parked=parked)


HOPPER = {
    "plain": {},
    "pages": {"page_size": 16},
    "large-pages": {"page_size": 256},
    "window": {"window": 100},
    "window-pages": {"window": 100, "page_size": 64},
    "alibi-sinks": {"dtype": torch.float16, "biased": True},
    "softcap": {"softcap": 30.0},
    "all": {"window": 100, "softcap": 30.0, "biased": True},
}


def compile_hopper(head_dim, name):
    options = {"dtype": torch.bfloat16} | HOPPER[name]
    args = prefill_args(head_dim, options.pop("dtype"), 4096, **options)
    return compile_op("flash_attn_varlen", "sm_90", *args)


def loops_without_masks(kernel, head_dim):
    """Of each consumer the loop over key tiles that need no mask, less what is jumped over while
    the base of the weights stays."""
    shape = prefill_hopper.config(head_dim, has_codes=False)
    products = (triton.next_power_of_2(head_dim) + shape.block_n) // 16
    for body in loops(kernel):
        votes = [at for at, line in enumerate(body) if "VOTE" in line]
        if len(votes) == 2 and sum("HGMMA" in line for line in body) == products:
            for vote in reversed(votes):
                jump = next(at for at in range(vote, len(body)) if "BRA" in body[at])
                label = re.search(r"\(([.]L_\w+)\)", body[jump])[1]
                del body[jump + 1 : body.index(f"{label}:")]
            yield body


# 96 and 192 are the kernels of 128 and 256 but for the width of a row.
HOPPER_CASES = [
    (head_dim, name) for name in HOPPER if name != "large-pages" for head_dim in (64, 128, 256)
]
HOPPER_CASES += [(head_dim, name) for head_dim in (96, 192) for name in ("plain", "pages")]
HOPPER_CASES += [(128, "large-pages")]


@pytest.mark.parametrize(("head_dim", "name"), HOPPER_CASES)
def test_prefill_hopper(head_dim, name):
    kernels = compile_hopper(head_dim, name)
    (prefill,) = kernels
    assert "wgmma.mma_async" in prefill.asm["ptx"]
    # What a tile of queries needs once may be parked while the loops run.
    assert local_memory(prefill) <= (176 if head_dim == 64 else 80)
    fast = [*loops_without_masks(prefill, head_dim)]
    assert len(fast) == (0 if name == "all" else 3 if head_dim == 64 else 2)
    for body in fast:
        parked = [line for line in body if re.search(r"\b(LDL|STL)\b", line)]
        # A value or, with ALiBi and softcap, a few are read from there.
        assert len(parked) <= (4 if name in ("alibi-sinks", "softcap") else 1)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_prefill_hopper_keeps_tensor_cores_busy(head_dim):
    (prefill,) = compile_hopper(head_dim, "plain")
    for body in loops_without_masks(prefill, head_dim):
        at = {
            name: [i for i, line in enumerate(body) if re.search(rf"\b{name}\b", line)]
            for name in ("HGMMA", "MUFU", "WARPGROUP", "PRMT", "FMNMX", "FMUL")
        }
        waits = [i for i in at["WARPGROUP"] if "DEPBAR" in body[i]]
        # Both products of a key tile are on their way before one is waited for.
        assert at["HGMMA"][-1] < waits[0] < at["MUFU"][0]
        # Weights become the operand of the next product without another move; neither maxima nor
        # scaling take time.
        assert not at["PRMT"] + at["FMNMX"] + at["FMUL"]


def test_prefill_hopper_of_many_sequences():
    args = prefill_args(128, torch.bfloat16, 4096)
    boundaries = [index(301), index(301)]
    kernels = compile_op("flash_attn_varlen", "sm_90", *args[:5], *boundaries, *args[7:])
    assert [kernel.name for kernel in kernels] == ["list_kernel", "_prefill_hopper_kernel"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("queries", [1, 16])
def test_paged_attention(target, head_dim, queries):
    args = decode_args(head_dim, torch.bfloat16, queries=queries)
    assert_attends_in_registers(compile_portable(target, *args, op="paged_attention"), target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize(
    "variant",
    [
        {"dtype": torch.float16, "window": 100, "softcap": 30.0},
        {"dtype": torch.bfloat16, "biased": True},
        {"dtype": torch.float32},
        {"dtype": torch.bfloat16, "page_size": 1, "group": 5, "num_splits": 1},
    ],
    ids=["window-softcap", "alibi-sinks", "fp32", "page-1-group-5-unsplit"],
)
def test_paged_attention_variants(target, head_dim, variant):
    variant = dict(variant)
    args = decode_args(head_dim, variant.pop("dtype"), **variant)
    assert_attends_in_registers(compile_portable(target, *args, op="paged_attention"), target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
def test_attention_from_codes(target, head_dim, codes):
    if codes != torch.int8 and not KNOWN_TARGETS[target].casts_to_fp8:
        pytest.skip("the target has no FP8")
    decode = decode_args(head_dim, torch.bfloat16, codes=codes)
    split = decode_args(head_dim, torch.bfloat16, codes=codes, num_splits=3, window=100)
    prefill = prefill_args(head_dim, torch.bfloat16, 4096, codes=codes, page_size=16)
    assert_attends_in_registers(compile_portable(target, *decode, op="paged_attention"), target)
    assert_attends_in_registers(compile_portable(target, *split, op="paged_attention"), target)
    assert_attends_in_registers(compile_portable(target, *prefill), target)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"queries": 2},
        {"page_size": 1},
        {"window": 100, "softcap": 30.0, "biased": True},
    ],
    ids=["plain", "rows-8", "pages-1", "all"],
)
def test_decode_hopper_from_codes(head_dim, variant):
    args = decode_args(head_dim, torch.bfloat16, codes=torch.int8, **variant)
    (kernel,) = compile_op("paged_attention", "sm_90", *args)
    assert kernel.name == "decode_hopper_kernel"
    assert_attends_in_registers([kernel], "sm_90")
    # Codes are converted where they are multiplied: nothing goes back to shared memory.
    assert not [line for line in product_loop(kernel) if re.search(r"\bSTS\b", line)]


@pytest.mark.parametrize("head_dim", [48, 64, 96, 128])
def test_prefill_hopper_from_codes(head_dim):
    args = prefill_args(head_dim, torch.bfloat16, 4096, codes=torch.int8, page_size=16)
    kernel = compile_op("flash_attn_varlen", "sm_90", *args)[-1]
    assert kernel.name == "_prefill_hopper_kernel"
    # Scores of 128 channels and outputs of 128 keys, 16 at a time.
    attending = [body for body in loops(kernel) if count(body, "HGMMA") == 8 + 8]
    # A loop of both for each consumer; what is around them may spill.
    for body in sorted(attending, key=len)[:4]:
        assert not count(body, "STL") + count(body, "LDL")


def count(body, instruction):
    return sum(bool(re.search(rf"\b{instruction}\b", line)) for line in body)


def test_hopper_leaves_other_codes_alone():
    fp8, wide = (
        decode_args(128, torch.bfloat16, **variant)
        for variant in ({"codes": torch.float8_e4m3fn}, {"codes": torch.int8, "queries": 8})
    )
    prefill = prefill_args(256, torch.bfloat16, 4096, codes=torch.int8, page_size=16)
    for op, args in (
        ("paged_attention", fp8),
        ("paged_attention", wide),
        ("flash_attn_varlen", prefill),
    ):
        assert "hopper" not in compile_op(op, "sm_90", *args)[0].name


@pytest.mark.parametrize(
    ("head_dim", "columns", "variant"),
    [
        (128, 8, {}),
        (64, 8, {"page_size": 64}),
        (96, 8, {"page_size": 256}),
        (128, 8, {"page_size": 1}),
        (96, 8, {"page_size": 48}),
        (128, 16, {"queries": 4}),
        (128, 32, {"queries": 8}),
        (128, 8, {"dtype": torch.float16, "group": 1, "biased": True}),
        (128, 8, {"window": 100, "softcap": 30.0, "biased": True}),
    ],
    ids=[
        "plain",
        "d64-pages-64",
        "d96-pages-256",
        "pages-1",
        "d96-pages-48",
        "rows-16",
        "rows-32",
        "mha-biased",
        "all",
    ],
)
def test_decode_hopper(head_dim, columns, variant):
    args = decode_args(head_dim, **({"dtype": torch.bfloat16} | variant))
    (kernel,) = compile_op("paged_attention", "sm_90", *args)
    # The queries are the columns of both products.
    assert f"wgmma.mma_async.sync.aligned.m64n{columns}k16" in kernel.asm["ptx"]
    assert_attends_in_registers([kernel], "sm_90")
    if not variant:
        assert local_memory(kernel) == 0


@pytest.mark.parametrize(
    ("queries", "options"),
    [(1, {}), (4, {"window": 100, "softcap": 30.0, "biased": True})],
    ids=["plain", "all"],
)
def test_decode_hopper_of_many_sequences(queries, options):
    q = meta(40 * queries, 32, 128)
    k = meta(64, 16, 8, 128)
    boundaries = index(41) if queries > 1 else None
    args = (
        q, None, q, k, k, index(40, 512), index(40), boundaries, queries,
        *features(32, **options), None, None, 0, 0, None,
    )  # fmt: skip
    (kernel,) = compile_op("paged_attention", "sm_90", *args)
    # Two programs fit an SM.
    assert kernel.metadata.shared <= 113 * 1024
    assert kernel.metadata.num_warps * 32 * kernel.metadata.maxnreg <= 65_536 // 2
    assert_attends_in_registers([kernel], "sm_90")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_merge_attn_states(target, dtype):
    out, lse = meta(5, 8, 128, dtype=dtype), meta(8, 5, dtype=torch.float32)
    compile_op("merge_attn_states", target, out, lse, out, lse, out, lse)
