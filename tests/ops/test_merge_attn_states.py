"""merge_attn_states against attention over the union of the keys, and against its formula in
float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echokernels import flash_attn_varlen, merge_attn_states
from tests.strategies import dtypes, generator, poisoned, randn, seeds, strided_randn, token_counts
from tests.tolerances import assert_close

INF = float("inf")


def oracle(out_1, lse_1, out_2, lse_2):
    out_1, lse_1, out_2, lse_2 = (t.double().cpu() for t in (out_1, lse_1, out_2, lse_2))
    lse = torch.logaddexp(lse_1, lse_2)
    share_1, share_2 = (
        (part - torch.where(lse.isneginf(), 0.0, lse)).exp().T[..., None] for part in (lse_1, lse_2)
    )
    out = torch.where(share_1 > 0, out_1 * share_1, 0.0) + torch.where(
        share_2 > 0, out_2 * share_2, 0.0
    )
    return out, lse


@given(
    tokens=token_counts,
    heads=st.sampled_from([1, 3, 8]),
    head_dim=st.sampled_from([1, 8, 64, 96, 256]),
    dtype=dtypes,
    pad=st.sampled_from([0, 8]),
    seed=seeds,
)
def test_merge(device, tokens, heads, head_dim, dtype, pad, seed):
    gen = generator(seed)
    outs = [
        strided_randn(tokens, heads, head_dim, dtype=dtype, device=device, gen=gen, pad=pad)
        for _ in range(2)
    ]
    # Spread over 20 nats, so that either side can vanish; some rows have seen no key at all.
    lses = [
        randn(heads, tokens, dtype=torch.float32, device=device, gen=gen, scale=20.0)
        for _ in range(2)
    ]
    for lse, out in zip(lses, outs, strict=True):
        empty = (torch.rand(heads, tokens, generator=gen) < 0.2).to(device)
        lse[empty] = -INF
        out[empty.T] = float("nan")
    out, lse = merge_attn_states(
        outs[0], lses[0], outs[1], lses[1],
        out=poisoned(tokens, heads, head_dim, dtype=dtype, device=device),
        out_lse=poisoned(heads, tokens, dtype=torch.float32, device=device),
    )  # fmt: skip
    want, want_lse = oracle(outs[0], lses[0], outs[1], lses[1])
    assert_close(out, want)
    assert_close(lse, want_lse)


def test_a02_two_empty_states_are_exactly_empty(device):
    out, lse = torch.zeros(1, 1, 64, device=device), torch.full((1, 1), -INF, device=device)
    merged, merged_lse = merge_attn_states(out, lse, out, lse)
    assert (merged == 0).all()
    assert merged_lse.isneginf().all()


def test_merge_in_place(device):
    gen = generator(1)
    out_1, out_2 = (randn(5, 2, 16, dtype=torch.float32, device=device, gen=gen) for _ in range(2))
    lse_1, lse_2 = (randn(2, 5, dtype=torch.float32, device=device, gen=gen) for _ in range(2))
    want, want_lse = merge_attn_states(out_1, lse_1, out_2, lse_2)
    merge_attn_states(out_1, lse_1, out_2, lse_2, out=out_1, out_lse=lse_1)
    assert torch.equal(out_1, want)
    assert torch.equal(lse_1, want_lse)


def test_prefix_and_suffix_make_the_whole(device):
    # A shared prefix of 70 keys and a causal suffix of 9: LSE in one base, natural (sglang#40903).
    gen = generator(2)
    q = randn(9, 4, 32, dtype=torch.float32, device=device, gen=gen)
    k, v = (randn(79, 2, 32, dtype=torch.float32, device=device, gen=gen) for _ in range(2))
    nine, seventy, all_keys = (torch.tensor([0, n], device=device) for n in (9, 70, 79))
    prefix = flash_attn_varlen(q, k[:70], v[:70], nine, seventy, return_lse=True)
    suffix = flash_attn_varlen(q, k[70:], v[70:], nine, nine, causal=True, return_lse=True)
    whole, whole_lse = flash_attn_varlen(q, k, v, nine, all_keys, causal=True, return_lse=True)
    out, lse = merge_attn_states(*prefix, *suffix)
    assert_close(out, whole.double(), roundings=4, scale=1.0)
    assert_close(lse, whole_lse.double(), roundings=4, scale=1.0)


def test_opcheck(device):
    gen = generator(3)
    out_1, out_2 = (
        strided_randn(5, 2, 16, dtype=torch.float32, device=device, gen=gen, pad=8).nan_to_num()
        for _ in range(2)
    )
    lse = torch.zeros(5, 2, device=device).T
    args = (torch.empty_like(out_1), torch.empty(2, 5, device=device), out_1, lse, out_2, lse)
    torch.library.opcheck(torch.ops.echo.merge_attn_states.default, args)


def test_bad_arguments():
    out, lse = torch.zeros(4, 2, 16), torch.zeros(2, 4)
    with pytest.raises(ValueError, match=r"prefix_lse.shape is \(4, 2\), must be \(2, 4\)"):
        merge_attn_states(out, lse.T, out, lse)
    with pytest.raises(TypeError, match=r"suffix_out\.dtype is float16, must be float32"):
        merge_attn_states(out, lse, out.half(), lse)


@pytest.mark.gpu
def test_a22_more_rows_than_a_grid_dimension(cuda):
    out = torch.randn(70_000, 40, 16, device=cuda)
    lse = torch.randn(40, 70_000, device=cuda)
    merged, merged_lse = merge_attn_states(out, lse, out, lse)
    assert_close(merged[-3:], out[-3:].double())
    assert_close(merged_lse, lse.double() + torch.tensor(2.0).double().log().to(cuda))
