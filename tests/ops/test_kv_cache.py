"""reshape_and_cache against a loop over tokens, bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echokernels._library import OPS
from echokernels.attention.kv_cache import _config, reshape_and_cache
from tests.ops.paged_cache import empty_cache
from tests.ops.quant_oracle import uneven_rows
from tests.ops.quantised_cache import (
    CODES_OF_HALVES,
    EACH_CODE,
    HALVES,
    NOT_FINITE,
    code_cache,
    rows_of_a17,
)
from tests.strategies import dtypes, generator, randn, seeds, token_counts
from tests.tolerances import assert_same_bits

pytestmark = NOT_FINITE

SENTINEL = 77.0
# 80, 96 and 192 are no powers of two (A05); the values' may differ from the keys'.
head_dims = st.sampled_from(
    [(64, 64), (80, 80), (96, 96), (192, 192), (7, 7), (192, 128), (16, 40)]
)
page_sizes = st.sampled_from([1, 8, 16, 24])
pads = st.sampled_from([0, 3, 8])
indices = st.sampled_from([torch.int32, torch.int64])


def oracle(cache: torch.Tensor, new: torch.Tensor, slots: list[int]) -> torch.Tensor:
    cache = cache.clone()
    num_pages, page_size = cache.shape[:2]
    for token, slot in enumerate(slots):
        if 0 <= slot < num_pages * page_size:
            cache[slot // page_size, slot % page_size] = new[token]
    return cache


@given(
    tokens=token_counts,
    kv_heads=st.sampled_from([1, 3, 8]),
    dims=head_dims,
    page_size=page_sizes,
    head_major=st.booleans(),
    pad=pads,
    dtype=dtypes,
    index=indices,
    seed=seeds,
)
def test_a05_a07_a23_reshape_and_cache(
    device, tokens, kv_heads, dims, page_size, head_major, pad, dtype, index, seed
):
    gen = generator(seed)
    num_pages = -(-2 * tokens // page_size) + 1
    num_slots = num_pages * page_size
    packed = randn(tokens, kv_heads, sum(dims) + 1, dtype=dtype, device=device, gen=gen)
    key, value = packed[..., : dims[0]], packed[..., dims[0] + 1 :]
    # Every slot at most once; those at either end are padding and out of range.
    slots = (torch.randperm(num_slots + 10, generator=gen) - 5)[:tokens]
    caches, buffers, wants = [], [], []
    for new in (key, value):
        shape = (num_pages, page_size, kv_heads, new.shape[2])
        cache, buffer = empty_cache(shape, head_major, pad, dtype, device)
        caches.append(cache)
        buffers.append(buffer)
        wants.append(oracle(cache, new, slots.tolist()))
    before = [buffer.clone() for buffer in buffers]
    reshape_and_cache(key, value, *caches, slots.to(index).to(device))
    for cache, want in zip(caches, wants, strict=True):
        assert_same_bits(cache, want)
    for buffer, cache, old in zip(buffers, caches, before, strict=True):
        cache.fill_(float("nan"))
        assert_same_bits(buffer, old)


@EACH_CODE
@given(
    tokens=token_counts,
    kv_heads=st.sampled_from([1, 3, 8]),
    dims=head_dims,
    page_size=page_sizes,
    head_major=st.booleans(),
    pad=pads,
    scale_head_major=st.booleans(),
    scale_pad=st.sampled_from([0, 1]),
    dtype=dtypes,
    index=indices,
    seed=seeds,
)
def test_a05_a07_a09_a23_quantised(
    device, code, tokens, kv_heads, dims, page_size, head_major, pad, scale_head_major, scale_pad,
    dtype, index, seed,
):  # fmt: skip
    gen = generator(seed)
    num_pages = -(-2 * tokens // page_size) + 1
    packed = uneven_rows(tokens, kv_heads, max(dims) * 2, dtype=dtype, device=device, gen=gen)
    # A head at either end, so that a row with one special column is special in either at times.
    key, value = packed[..., : dims[0]], packed[..., -dims[1] :]
    slots = (torch.randperm(num_pages * page_size + 10, generator=gen) - 5)[:tokens].to(index)
    k, v = (
        code_cache(
            (num_pages, page_size, kv_heads, dim), code, device, head_major=head_major, pad=pad,
            scale_head_major=scale_head_major, scale_pad=scale_pad,
        )
        for dim in dims
    )  # fmt: skip
    reshape_and_cache(key, value, k.codes, v.codes, slots.to(device), k.scale, v.scale)
    k.assert_received(key, slots)
    v.assert_received(value, slots)


def test_keys_and_values_have_scales_of_their_own_strides(device):
    gen = generator(0)
    key, value = (
        randn(5, 3, 16, dtype=torch.float32, device=device, gen=gen, scale=s) for s in (1.0, 9.0)
    )
    shape, slots = (3, 4, 3, 16), torch.tensor([11, 0, -1, 12, 5])
    k = code_cache(shape, torch.int8, device, scale_head_major=True, scale_pad=2)
    v = code_cache(shape, torch.int8, device, head_major=True, pad=3)
    reshape_and_cache(key, value, k.codes, v.codes, slots.to(device), k.scale, v.scale)
    k.assert_received(key, slots)
    v.assert_received(value, slots)


def test_a16_halves_round_to_even(device):
    key = torch.tensor([[HALVES]], device=device)
    k, v = (code_cache((1, 2, 1, 10), torch.int8, device) for _ in range(2))
    slot = torch.tensor([1], device=device)
    reshape_and_cache(key, -key, k.codes, v.codes, slot, k.scale, v.scale)
    assert k.scale[0, 1].item() == v.scale[0, 1].item() == 1.0
    assert k.codes[0, 1].tolist() == [CODES_OF_HALVES]
    assert v.codes[0, 1].tolist() == [[-code for code in CODES_OF_HALVES]]


@EACH_CODE
@pytest.mark.parametrize("only", [None, 0, 1, 2])
def test_a17_zero_rows_and_masked_lanes(device, code, only):
    key = rows_of_a17(device)[:, None]
    key = key if only is None else key[only : only + 1]
    tokens = len(key)
    k, v = (code_cache((1, 4, 1, 13), code, device) for _ in range(2))
    slots = torch.arange(tokens)
    reshape_and_cache(key, key, k.codes, v.codes, slots.to(device), k.scale, v.scale)
    if only in (None, 0):
        assert k.scale[0, 0].item() == pytest.approx(1e-12)
        assert not k.codes[0, 0].float().any()
    k.assert_received(key, slots)
    v.assert_received(key, slots)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_a09_padding_and_slots_beyond_the_cache(device, index):
    # Slot -1 would be page 0, offset 15, or the row before the cache; 32 is the row behind it.
    block, heads, dim = 16, 2, 8
    buffers = [torch.full((4, block, heads, dim), SENTINEL, device=device) for _ in range(2)]
    k_cache, v_cache = (buffer[1:3] for buffer in buffers)
    key, value = torch.randn(2, 6, heads, dim, device=device)
    slots = torch.tensor([0, -1, 17, -1, 32, 2**31 - 1], dtype=index, device=device)
    reshape_and_cache(key, value, k_cache, v_cache, slots)
    for buffer, new in zip(buffers, (key, value), strict=True):
        rows = buffer.view(4 * block, heads, dim)
        assert torch.equal(rows[block], new[0])
        assert torch.equal(rows[block + 17], new[2])
        rows[[block, block + 17]] = SENTINEL
        assert (rows == SENTINEL).all()


def test_all_slots_negative(device):
    cache = torch.full((2, 4, 1, 8), SENTINEL, device=device)
    key = torch.randn(3, 1, 8, device=device)
    slots = torch.tensor([-1, -7, torch.iinfo(torch.int64).min], device=device)
    reshape_and_cache(key, key, cache, cache.clone(), slots)
    assert (cache == SENTINEL).all()


def test_one_of_the_tokens_that_share_a_slot_remains(device):
    cache = torch.full((2, 4, 3, 8), SENTINEL, device=device)
    key = torch.randn(2, 3, 8, device=device)
    reshape_and_cache(key, key, cache, cache.clone(), torch.tensor([5, 5], device=device))
    for head in range(3):
        assert any(torch.equal(cache[1, 1, head], key[token, head]) for token in range(2))
    cache[1, 1] = SENTINEL
    assert (cache == SENTINEL).all()


@pytest.mark.usefixtures("debug_checks")
def test_debug_refuses_slots_beyond_the_cache_only(device):
    cache = torch.zeros(2, 4, 1, 8, device=device)
    key = torch.randn(2, 1, 8, device=device)
    reshape_and_cache(key, key, cache, cache.clone(), torch.tensor([-1, 7], device=device))
    assert torch.equal(cache[1, 3], key[1])
    with pytest.raises(ValueError, match=r"slot_mapping holds 0\.\.8, must lie in"):
        reshape_and_cache(key, key, cache, cache.clone(), torch.tensor([0, 8], device=device))


def test_an_empty_cache_stores_nothing(device):
    cache = torch.zeros(0, 4, 1, 8, device=device)
    key = torch.randn(2, 1, 8, device=device)
    reshape_and_cache(key, key, cache, cache.clone(), torch.tensor([-1, 0], device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("head_major", [False, True])
def test_a01_pages_beyond_int32(cuda, head_major):
    # Pages of 16 x 8 x 128 = 16,384 elements: page 131,072 is the first whose offset reaches 2^31.
    pages = [0, 131_071, 131_072, 131_199]
    inner = (8, 16) if head_major else (16, 8)
    caches = torch.empty(2, 131_200, *inner, 128, dtype=torch.bfloat16, device=cuda)
    if head_major:
        caches = caches.transpose(2, 3)
    small = torch.zeros(2, len(pages), 16, 8, 128, dtype=torch.bfloat16, device=cuda)
    for cache in caches:
        cache[pages] = 0
    key, value = torch.randn(2, len(pages), 8, 128, device=cuda).bfloat16()
    index = torch.arange(len(pages), device=cuda)
    reshape_and_cache(key, value, *small, index * 16 + 5)
    reshape_and_cache(key, value, *caches, torch.tensor(pages, device=cuda) * 16 + 5)
    for cache, want, new in zip(caches, small, (key, value), strict=True):
        assert torch.equal(want[index, 5], new)
        assert torch.equal(cache[pages], want)


@pytest.mark.gpu
def test_a01_more_than_2_31_elements_of_keys(cuda):
    packed = torch.empty(2**31 // 4096 + 2, 32, 128, dtype=torch.bfloat16, device=cuda)
    packed[-2:] = torch.randn(2, 32, 128, device=cuda)
    slots = torch.full((packed.shape[0],), -1, device=cuda)
    slots[-2:] = torch.tensor([3, 9], device=cuda)
    k_cache, v_cache = torch.zeros(2, 1, 16, 8, 128, dtype=torch.bfloat16, device=cuda)
    reshape_and_cache(packed[:, 16:24], packed[:, 24:], k_cache, v_cache, slots)
    assert torch.equal(k_cache[0, [3, 9]], packed[-2:, 16:24])
    assert torch.equal(v_cache[0, [3, 9]], packed[-2:, 24:])


@pytest.mark.gpu
def test_a01_scales_beyond_int32(cuda):
    # A page of scales lies 2^22 floats from the next: page 512 is the first beyond 2^31.
    scales = torch.empty(513 * 2**22, device=cuda).as_strided((513, 16, 1), (2**22, 1, 1))
    scales[[0, 512]] = float("nan")
    codes = torch.zeros(2, 513, 16, 1, 16, dtype=torch.int8, device=cuda)
    key = torch.randn(1, 1, 16, device=cuda)
    slot = torch.tensor([512 * 16 + 3], device=cuda)
    reshape_and_cache(key, key, *codes, slot, scales, torch.empty(513, 16, 1, device=cuda))
    # A GPU would multiply by the inverse of a number.
    assert torch.equal(scales[512, 3, 0].cpu(), key.abs().max().cpu() / 127)
    assert scales[0].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [65_535, 65_536, 70_000])
def test_a22_more_rows_than_a_grid_dimension(cuda, tokens):
    key, value = torch.randn(2, tokens, 1, 16, device=cuda)
    slots = torch.randperm(tokens, device=cuda)
    k_cache, v_cache = torch.zeros(2, tokens, 1, 1, 16, device=cuda)
    reshape_and_cache(key, value, k_cache, v_cache, slots)
    assert torch.equal(k_cache[slots, 0], key)
    assert torch.equal(v_cache[slots, 0], value)


@pytest.mark.gpu
@pytest.mark.multi_gpu
@pytest.mark.usefixtures("two_gpus")
def test_a20_device_that_is_not_current():
    key, value = torch.randn(2, 4, 2, 16, device="cuda:1")
    k_cache, v_cache = torch.zeros(2, 3, 4, 2, 16, device="cuda:1")
    slots = torch.tensor([0, 5, -1, 11], device="cuda:1")
    reshape_and_cache(key, value, k_cache, v_cache, slots)
    assert torch.cuda.current_device() == 0
    want = torch.zeros(3, 4, 2, 16)
    assert torch.equal(k_cache.cpu(), oracle(want, key.cpu(), slots.tolist()))
    assert torch.equal(v_cache.cpu(), oracle(want, value.cpu(), slots.tolist()))


@pytest.mark.gpu
def test_captured_graph_replays_on_new_slots(cuda):
    key, value = torch.randn(2, 4, 2, 16, device=cuda)
    k_cache, v_cache = torch.zeros(2, 3, 4, 2, 16, device=cuda)
    slots = torch.full((4,), -1, dtype=torch.int32, device=cuda)
    reshape_and_cache(key, value, k_cache, v_cache, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        reshape_and_cache(key, value, k_cache, v_cache, slots)
    for new_slots in ([0, 5, -1, 11], [3, 2, 1, -1]):
        slots.copy_(torch.tensor(new_slots))
        key.normal_()
        value.normal_()
        wants = [oracle(k_cache, key, new_slots), oracle(v_cache, value, new_slots)]
        graph.replay()
        assert torch.equal(k_cache, wants[0])
        assert torch.equal(v_cache, wants[1])


@pytest.mark.gpu
def test_compiled_equals_eager(cuda):
    # The caches are separate inputs: of views that the graph itself takes, PyTorch may lose the
    # offset (pytorch#198068).
    def write(packed, k_cache, v_cache, slots):
        kv = (packed * 2).view(packed.shape[0], 2, 2, 16)
        reshape_and_cache(kv[:, 0], kv[:, 1], k_cache, v_cache, slots)

    compiled = torch.compile(write, fullgraph=True, dynamic=True)
    for tokens in (3, 7):
        packed = torch.randn(tokens, 64, device=cuda)
        slots = torch.randperm(12, device=cuda)[:tokens] - 1
        have, want = torch.zeros(2, 2, 3, 4, 2, 16, device=cuda)
        compiled(packed, *have, slots)
        write(packed, *want, slots)
        assert want.any()
        assert torch.equal(have, want)


def test_a21_opcheck(device):
    overload = torch.ops.echo.reshape_and_cache.default
    packed = torch.randn(3, 4, 2, 8, device=device)
    caches = torch.zeros(2, 5, 2, 4, 8, device=device)
    slots = torch.tensor([7, -1, 0], device=device)
    key, value = packed[:, 1], packed[:, 2]
    k_cache, v_cache = caches.transpose(2, 3)
    torch.library.opcheck(overload, (key, value, k_cache, v_cache, slots, None, None))
    contiguous = (key.clone(), value.clone(), torch.zeros(5, 4, 2, 8, device=device))
    args = (*contiguous, contiguous[-1].clone(), slots.int(), None, None)
    torch.library.opcheck(overload, args)


def test_a21_opcheck_quantised(device):
    key, value = torch.randn(2, 3, 2, 8, device=device)
    # opcheck cannot compare FP8: PyTorch has no product of it.
    k = code_cache((5, 4, 2, 8), torch.int8, device)
    v = code_cache((5, 4, 2, 8), torch.int8, device, head_major=True, scale_head_major=True)
    slots = torch.tensor([7, -1, 0], device=device)
    torch.library.opcheck(
        torch.ops.echo.reshape_and_cache.default,
        (key, value, k.codes, v.codes, slots, k.scale, v.scale),
    )


def bad_calls(key, cache, slots):
    """(error, message, the arguments that differ from the good ones)."""
    scale = torch.ones(cache.shape[:3], device=cache.device)
    codes = {"k_cache": cache.char(), "v_cache": cache.char(), "k_scale": scale, "v_scale": scale}
    k_is = "k_scale is None, must be a tensor: k_cache.dtype is torch.int8, codes that need scales"
    no_scales = "is given, must be None: k_cache.dtype is torch.float32, which has no scales"
    strided = torch.stack([slots, slots], 1)[:, 0]
    empty = cache[:, :0]
    yield ValueError, f"k_scale {no_scales}", {"k_scale": scale}
    yield ValueError, f"v_scale {no_scales}", {"v_scale": scale}
    yield ValueError, k_is, {**codes, "k_scale": None}
    yield ValueError, "v_scale is None, must be a tensor", {**codes, "v_scale": None}
    yield ValueError, "v_scale.shape is (2, 16, 2)", {**codes, "v_scale": scale[:2]}
    yield TypeError, "k_scale.dtype is float16, must be float32", {**codes, "k_scale": scale.half()}
    yield TypeError, "v_cache.dtype is float32, must be int8", {**codes, "v_cache": cache}
    fp8 = cache.to(torch.float8_e4m3fn)
    yield TypeError, "v_cache.dtype is float8_e4m3fn, must be int8", {**codes, "v_cache": fp8}
    yield (
        TypeError,
        "k_cache.dtype is uint8, must be float32, int8, float8_e4m3fn",
        {"k_cache": cache.byte()},
    )
    yield TypeError, "v_cache.dtype is float16, must be float32", {"v_cache": cache.half()}
    yield TypeError, "key.dtype is int32", {"key": key.int()}
    yield TypeError, "value.dtype is float16, must be float32", {"value": key.half()}
    yield TypeError, "slot_mapping.dtype is float32", {"slot_mapping": slots.float()}
    yield ValueError, "key has shape (4, 16), must have 3 dim", {"key": key.flatten(1)}
    yield ValueError, "value.shape is (3, 2, 8), must be (4, 2, *)", {"value": key[:3]}
    yield ValueError, "k_cache.shape is (3, 16, 1, 8)", {"k_cache": cache[:, :, :1]}
    yield ValueError, "v_cache.shape is (2, 16, 2, 8)", {"v_cache": cache[:2]}
    yield ValueError, "a page size of at least 1", {"k_cache": empty, "v_cache": empty}
    yield ValueError, "slot_mapping.shape is (3,), must be (4)", {"slot_mapping": slots[:3]}
    yield ValueError, "slot_mapping.stride() is (2,)", {"slot_mapping": strided}
    yield ValueError, "key.stride() is (16, 1, 2)", {"key": key.mT.contiguous().mT}
    yield ValueError, "value.stride() is (16, 1, 2)", {"value": key.mT.contiguous().mT}
    yield ValueError, "k_cache.stride() is (256, 16, 1, 2)", {"k_cache": cache.mT.contiguous().mT}
    yield ValueError, "v_cache.stride() is (256, 16, 1, 2)", {"v_cache": cache.mT.contiguous().mT}


def test_a12_bad_arguments(device):
    key = torch.randn(4, 2, 8, device=device)
    cache = torch.zeros(3, 16, 2, 8, device=device)
    slots = torch.zeros(4, dtype=torch.int32, device=device)
    good = {"key": key, "value": key, "k_cache": cache, "v_cache": cache.clone()}
    good["slot_mapping"] = slots
    reshape_and_cache(**good)
    for error, message, bad in bad_calls(key, cache, slots):
        with pytest.raises(error) as caught:
            reshape_and_cache(**{**good, **bad})
        assert message in str(caught.value)


def test_a20_mixed_devices_are_refused():
    key, cache = torch.empty(4, 2, 8), torch.empty(3, 16, 2, 8)
    slots = torch.empty(4, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match=r"slot_mapping\.device is meta, must be cpu as key's is"):
        OPS["reshape_and_cache"].check(key, key, cache, cache, slots, None, None)


def test_config_covers_the_head_and_bounds_the_tile():
    for kv_heads, head_dim in [(1, 7), (3, 80), (8, 128), (40, 64), (2, 2048)]:
        config = _config(kv_heads, head_dim)
        assert config.block_n >= head_dim
        assert config.block_m == 1 or config.block_m * config.block_n <= 1024
