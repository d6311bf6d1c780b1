"""Sampling of one token per row of logits.

    token = argmax over the allowed ids i of (logit_i - max) / temperature + g_i

With Gumbel noise g_i = -log(-log(1 - u_i)) this draws an id with its softmax probability among the
allowed ones (Gumbel, 1954; Maddison et al., "A* Sampling", 2014). u_i is one of the four 32-bit
words of Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011) with the
row's seed as key and (id // 4, position) as counter. So a row's token depends on its own arguments
alone, never on the batch around it.

Filters apply after the temperature, each to what the one before has left; what ties with the last
id kept is kept too, and the most likely id always:
  top_k  ids with at least the k-th largest logit; <= 0 or >= vocab keeps all
  top_p  the smallest set of most likely ids with this share of the mass; <= 0 keeps the most likely
         id, >= 1 keeps all
  min_p  ids at least min_p times as likely as the most likely one
A temperature of 0, or below 2^-126 (fp32 may flush it to 0), is greedy: the largest logit, the
lowest id on ties.

A NaN logit counts as -inf, and +inf as the largest finite fp32 number. A row with nothing above
-inf gives token 0 and, as if all its logits were equal, logprob -log(vocab).

logits [rows, vocab], all else [rows]. Arithmetic and sums are in fp32. Mutates tokens and logprobs.
"""

import torch
import triton

from echokernels._checks import (
    FLOATS,
    INDEX,
    check_dim,
    check_dtype,
    check_last_contiguous,
    check_same_device,
    check_shape,
)
from echokernels._launch import launch, scratch
from echokernels._library import define_op
from echokernels._pdl import early_launch
from echokernels._tuning import TileConfig, select
from echokernels.sampling import reference
from echokernels.sampling._candidates import MAX_LISTED
from echokernels.sampling._choice import NUM_LISTS, choice_kernel
from echokernels.sampling._summary import NUM_FIELDS, summary_kernel

# An fp32 number that came from a half has this many low bits that tell nothing.
_KEY_SHIFT = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
# fp32, in which ids are counted and kept, is exact up to here.
_MAX_VOCAB = 2**24


def _config(vocab: int) -> TileConfig:
    """A slice of a row. The batch has no say: sums, and so tokens, must not depend on it."""
    block_n = min(max(triton.next_power_of_2(vocab), 128), 4096)
    return TileConfig(1, block_n, num_warps=max(block_n // 1024, 1))


def _group(vocab: int) -> int:
    """How many neighbouring ids make a group."""
    # 32 halves are two sectors of memory, the least worth reading again. With at most 8,192 groups
    # a program of 8 warps keeps the largest logit of each in registers.
    return max(32, triton.next_power_of_2(triton.cdiv(vocab, 8192)))


def _check(
    tokens: torch.Tensor,
    logprobs: torch.Tensor | None,
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    check_dim("logits", logits, 2)
    check_dtype("logits", logits, FLOATS)
    check_last_contiguous("logits", logits)
    rows, vocab = logits.shape
    if not 1 <= vocab <= _MAX_VOCAB:
        raise ValueError(
            f"logits.shape is {tuple(logits.shape)}, "
            f"must have a last dimension from 1 to {_MAX_VOCAB}"
        )
    per_row = {
        "tokens": (tokens, INDEX),
        "logprobs": (logprobs, (torch.float32,)),
        "temperature": (temperature, (torch.float32,)),
        "top_k": (top_k, INDEX),
        "top_p": (top_p, (torch.float32,)),
        "min_p": (min_p, (torch.float32,)),
        "seeds": (seeds, (torch.int64,)),
        "positions": (positions, INDEX),
    }
    for name, (tensor, dtypes) in per_row.items():
        if tensor is not None:
            check_shape(name, tensor, rows)
            check_dtype(name, tensor, dtypes)
            check_last_contiguous(name, tensor)
    tensors = {name: tensor for name, (tensor, _) in per_row.items()}
    check_same_device("logits", logits, **tensors)


def _launch(
    tokens: torch.Tensor,
    logprobs: torch.Tensor | None,
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    rows, vocab = logits.shape
    config = select("sample", vocab, lambda: _config(vocab))
    group = _group(vocab)
    num_groups = triton.cdiv(vocab, group)
    num_slices = triton.cdiv(vocab, config.block_n)
    group_peaks = scratch((rows, num_groups), torch.float32, logits.device)
    slices = scratch((rows, NUM_FIELDS.value, num_slices), torch.float32, logits.device)
    lists = scratch((rows, NUM_LISTS.value, MAX_LISTED.value), torch.float32, logits.device)
    per_row = (temperature, top_k, top_p, min_p, seeds, positions)
    sizes = (vocab, num_groups, num_slices, logits.stride(0))
    launch(
        summary_kernel,
        (rows * num_slices,),
        group_peaks,
        slices,
        logits,
        *per_row,
        *sizes,
        HAS_LOGPROBS=logprobs is not None,
        GROUP=group,
        BLOCK_N=config.block_n,
        NOISE_N=min(config.block_n, 256 * config.num_warps),
        num_warps=config.num_warps,
        **early_launch(logits.device),
    )
    launch(
        choice_kernel,
        (rows,),
        tokens,
        temperature if logprobs is None else logprobs,
        lists,
        group_peaks,
        slices,
        logits,
        *per_row,
        *sizes,
        HAS_LOGPROBS=logprobs is not None,
        KEY_SHIFT=_KEY_SHIFT[logits.dtype],
        GROUP=group,
        GROUPS=triton.next_power_of_2(num_groups),
        SLICES=triton.next_power_of_2(num_slices),
        BLOCK_N=4096,
        num_warps=8,
        **early_launch(logits.device),
    )


_sample = define_op(
    "sample(Tensor(a!) tokens, Tensor(b!)? logprobs, Tensor logits, Tensor temperature, "
    "Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds, Tensor positions) -> ()",
    check=_check,
    triton=_launch,
    reference=reference.sample,
)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    tokens: torch.Tensor | None = None,
    logprobs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draws one token id per row of `logits`; the module's docstring tells how, and the edges.

    logits: [rows, vocab], fp16, bf16 or fp32, last dimension contiguous, any row stride. The others
    are [rows]: temperature, top_p and min_p fp32, top_k and positions int32 or int64, seeds int64
    (any 64 bits). A filter that is None is off. `positions` are the places of the drawn tokens in
    their sequences; rows with equal seed and position have equal noise. `logprobs`, fp32, receives
    the log-softmax of the raw logits (before temperature and filters) at the drawn ids.
    Returns `tokens`, int32 or int64; allocated as int64 unless given.
    Raises ValueError or TypeError for shapes, strides, devices or dtypes that do not fit.
    """
    rows = logits.shape[:1]
    if tokens is None:
        tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if top_k is None:
        top_k = torch.zeros(rows, dtype=torch.int32, device=logits.device)
    if top_p is None:
        top_p = torch.ones(rows, device=logits.device)
    if min_p is None:
        min_p = torch.zeros(rows, device=logits.device)
    _sample(tokens, logprobs, logits, temperature, top_k, top_p, min_p, seeds, positions)
    return tokens
