"""The decode for Hopper, in Gluon: keys and values by TMA, products by WGMMA.

A few programs for each SM. Each finds its share of all key tiles (`_hopper_shares`); a warp each
loads K and V, and four attend to them (`_hopper_decode`); pieces of sequences merge
(`_hopper_pieces`). From INT8 pages a third warp loads scales (`_hopper_scales`), and those that
attend multiply in registers (`_hopper_codes`). Pages that TMA cannot put together are copied row by
row (`_hopper_copies`). It computes what the portable kernels do, and takes fp16 and bf16 with head
dims over 32 up to 128, and up to 32 rows of (query, head of the group) a sequence, from INT8 pages
up to 8.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from echokernels._launch import counter, launch
from echokernels._pdl import early_launch, let_next_start, wait_for_previous
from echokernels._target import Target
from echokernels.attention._arguments import alibi_stride, scale_strides
from echokernels.attention._hopper_codes import consume_codes, make_sums
from echokernels.attention._hopper_copies import THREADS, Pages, produce_by_copies
from echokernels.attention._hopper_decode import consume, make_operands, produce
from echokernels.attention._hopper_memory import make_ring, make_ring_beside
from echokernels.attention._hopper_pieces import columns
from echokernels.attention._hopper_scales import Scales, make_scale_tiles, produce_scales
from echokernels.attention._hopper_shares import DecodeCall, DecodeShape, share_of_program
from echokernels.attention._hopper_tma import (
    GLUON_DTYPES,
    descriptor,
    fills_tiles,
    is_addressable,
    steps,
)
from echokernels.attention._sharing import Kind, Sharing, sharing_of
from echokernels.attention.split import MOST_SEQS, MOST_SHARED_ROWS, block_seqs, num_shares
from echokernels.attention.workspace import partials

_LOG2_E = 1.4426950408889634
_BLOCK_N = 64  # what WGMMA multiplies at once
# Of the tiles on their way in a program. More put no more bytes in flight than memory needs, but
# keep the programs of the next launch out of the SM, where they would wait ready to start.
_TILE_BYTES = 64 * 1024
_TILE_BYTES_OF_CODES = 48 * 1024
# Two programs fit an SM: of one launch, or of two.
_REGISTERS = 128
LOADER_REGISTERS = gl.constexpr(64)
# Queries stay in registers.
_MOST_ROWS_OF_CODES = 8
SHARINGS = tuple(Sharing(_BLOCK_N, per_sm) for per_sm in (1, 2, 4))


def default_sharing(is_large: bool) -> Sharing:
    """Measured on an H200: two programs on an SM hide each other's softmax when there is enough to
    read; where latency counts, fewer pieces do."""
    return Sharing(_BLOCK_N, 2 if is_large else 1)


def sharing(
    device: torch.device,
    target: Target,
    head_dim: int,
    dtype: torch.dtype,
    group: int,
    units: int,
) -> Sharing:
    """units: sequences times KV heads."""
    is_large = units > target.num_sms
    kind = Kind("hopper", head_dim, dtype, group, is_large)
    return sharing_of(device, kind, default_sharing(is_large), SHARINGS)


# Index tensors may be slices at any offset of larger buffers: their alignment varies at run time.
@gluon.jit(
    do_not_specialize=[
        "counter_ptr", "table_ptr", "seqused_k_ptr", "cu_seqlens_q_ptr", "slopes_ptr", "sinks_ptr",
        "num_seqs", "kv_heads", "rows", "window_left", "window_right", "k_stride_page",
        "k_stride_slot", "k_stride_head", "v_stride_page", "v_stride_slot", "v_stride_head",
        "k_scale_ptr", "v_scale_ptr", "k_scale_stride_page", "k_scale_stride_slot",
        "k_scale_stride_head", "v_scale_stride_page", "v_scale_stride_slot", "v_scale_stride_head",
        "table_stride", "slopes_stride", "lse_stride_head", "lse_stride_token",
    ]
)  # fmt: skip
def decode_hopper_kernel(
    out_ptr,  # [tokens, heads, head_dim]
    lse_ptr,  # f32[heads, tokens], or None
    piece_out_ptr,
    piece_lse_ptr,
    counter_ptr,
    q_ptr,  # [tokens, heads, head_dim]
    k,  # [num_pages, page_size, kv_heads, head_dim]: a TMA descriptor, or a pointer
    v,
    table_ptr,  # [num_seqs, max_pages]
    seqused_k_ptr,  # [num_seqs]
    cu_seqlens_q_ptr,  # [num_seqs + 1], or None: one query each
    slopes_ptr,  # f32[heads] or [num_seqs, heads], or None
    sinks_ptr,  # [heads], or None
    k_scale_ptr,  # f32[num_pages, page_size, kv_heads] of codes, or None
    v_scale_ptr,
    num_seqs,
    kv_heads,
    rows,  # (query, head of the group) of a sequence, at most
    out_stride_token,
    out_stride_head,
    lse_stride_head,
    lse_stride_token,
    q_stride_token,
    q_stride_head,
    k_stride_page,  # of K and V in units of 16 bytes
    k_stride_slot,
    k_stride_head,
    v_stride_page,
    v_stride_slot,
    v_stride_head,
    k_scale_stride_page,
    k_scale_stride_slot,
    k_scale_stride_head,
    v_scale_stride_page,
    v_scale_stride_slot,
    v_scale_stride_head,
    table_stride,
    slopes_stride,
    window_left,
    window_right,
    scale,
    cap,
    S: gl.constexpr,
    BLOCK_SEQS: gl.constexpr,
    PDL: gl.constexpr,
):
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    PRODUCERS: gl.constexpr = THREADS if S.has_copies else 1
    # A warp of them copies scales beside the tiles that TMA loads.
    K_PRODUCERS: gl.constexpr = 2 + 32 if S.has_codes and not S.has_copies else PRODUCERS
    if S.has_codes:
        k_ring = make_ring(gl.int8, S.slots, S.block_n, S.block_d, 1, K_PRODUCERS)
        v_ring = make_ring_beside(k_ring)
        scales = Scales(
            k_scale_ptr, k_scale_stride_page, k_scale_stride_slot, k_scale_stride_head,
            v_scale_ptr, v_scale_stride_page, v_scale_stride_slot, v_scale_stride_head,
            make_scale_tiles(S.slots, S.block_n), make_scale_tiles(S.slots, S.block_n),
        )  # fmt: skip
        memory = make_sums(S.block_d, columns(S.most_rows))
    else:
        k_ring = make_ring(dtype, S.slots, S.block_n, S.block_d, 1, PRODUCERS)
        v_ring = make_ring(dtype, S.slots, S.block_n, S.block_d, 1, PRODUCERS)
        memory = make_operands(dtype, S)
        scales = k_ring
    # What is absent is not used: anything else takes its place.
    call = DecodeCall(
        num_seqs, kv_heads, rows, window_left, window_right, scale, cap, q_ptr, q_stride_token,
        q_stride_head, seqused_k_ptr, cu_seqlens_q_ptr if S.has_boundaries else seqused_k_ptr,
        table_ptr, table_stride, slopes_ptr if S.has_alibi else seqused_k_ptr, slopes_stride,
        sinks_ptr if S.has_sinks else seqused_k_ptr, out_ptr, out_stride_token, out_stride_head,
        lse_ptr if S.has_lse else piece_lse_ptr, lse_stride_head, lse_stride_token, piece_out_ptr,
        piece_lse_ptr, counter_ptr, S,
    )  # fmt: skip
    wait_for_previous(PDL)
    shares, seq, tile, at, left, has_empty = share_of_program(call, BLOCK_SEQS)
    let_next_start(PDL)
    uses = (k_ring, v_ring, scales, memory, shares, seq, tile, at, left, has_empty, call)
    if S.has_copies:
        k_pages = Pages(k, k_stride_page, k_stride_slot, k_stride_head)
        v_pages = Pages(v, v_stride_page, v_stride_slot, v_stride_head)
        loads = (k_pages, v_pages, k_ring, v_ring, scales, seq, tile, left, call)
        gl.warp_specialize([(_attend, uses), (produce_by_copies, loads)], [4], [LOADER_REGISTERS])
    else:
        k_loads = (k, k_ring, seq, tile, left, call)
        v_loads = (v, v_ring, seq, tile, left, call)
        if S.has_codes:
            scale_loads = (scales, k_ring, seq, tile, left, call)
            gl.warp_specialize(
                [
                    (_attend, uses),
                    (produce, k_loads),
                    (produce, v_loads),
                    (produce_scales, scale_loads),
                ],
                [1, 1, 1],
                [LOADER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS],
            )
        else:
            gl.warp_specialize(
                [(_attend, uses), (produce, k_loads), (produce, v_loads)],
                [1, 1],
                [LOADER_REGISTERS, LOADER_REGISTERS],
            )


@gluon.jit
def _attend(k_ring, v_ring, scales, memory, shares, seq, tile, at, left, has_empty, call):
    if call.S.has_codes:
        consume_codes(
            k_ring, v_ring, scales, memory, shares, seq, tile, at, left, has_empty, call
        )  # fmt: skip
    else:
        consume(k_ring, v_ring, memory, shares, seq, tile, at, left, has_empty, call)


def can_run(
    target: Target,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_seqs: int,
    max_seqlen_q: int,
    softmax_scale: float,
) -> bool:
    """Whether the kernel takes this call: what TMA cannot address is left to the portable ones."""
    num_pages, _, kv_heads = k_cache.shape[:3]
    rows = _rows(q, kv_heads, max_seqlen_q)
    return (
        num_pages > 0
        and (k_cache.dtype == q.dtype or _converts(k_cache.dtype, rows))
        and softmax_scale > 0
        and is_made_for(target, q.dtype, q.shape[-1], rows, num_seqs)
        and all(is_addressable(x) for x in (k_cache, v_cache))
    )


def _converts(codes: torch.dtype, rows: int) -> bool:
    return codes == torch.int8 and rows <= _MOST_ROWS_OF_CODES


def _rows(q: torch.Tensor, kv_heads: int, max_seqlen_q: int) -> int:
    """(query, head of the group) of a sequence, at most."""
    return q.shape[1] // kv_heads * min(max_seqlen_q, q.shape[0])


def is_made_for(
    target: Target, dtype: torch.dtype, head_dim: int, rows: int, num_seqs: int
) -> bool:
    """The same of a call's sizes; rows: (query, head of the group) of a sequence, at most."""
    return (
        target.runs_hopper_kernels
        and dtype in GLUON_DTYPES
        and 32 < head_dim <= 128
        and head_dim % 8 == 0
        and rows <= MOST_SHARED_ROWS
        and num_seqs <= MOST_SEQS
    )


def launch_hopper(
    target: Target,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seqused_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_q: int,
    softmax_scale: float,
    window: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> None:
    """window: (left, right), -1 for all."""
    heads, head_dim = q.shape[1:]
    page_size, kv_heads = k_cache.shape[1:3]
    num_seqs = seqused_k.shape[0]
    group = heads // kv_heads
    rows = _rows(q, kv_heads, max_seqlen_q)
    block_d = triton.next_power_of_2(head_dim)
    kind = head_dim, k_cache.dtype, group, num_seqs * kv_heads
    keys, per_sm = sharing(q.device, target, *kind)
    tile_bytes = _TILE_BYTES if k_scale is None else _TILE_BYTES_OF_CODES
    programs = num_shares(kv_heads, per_sm, target.num_sms) * kv_heads
    piece_out, piece_lse = partials(workspace, q, programs * 2 * rows)
    caches = k_cache, v_cache
    has_tma = fills_tiles(page_size, keys)
    shape = DecodeShape(
        head_dim=head_dim,
        block_d=block_d,
        block_n=keys,
        slots=tile_bytes // (2 * k_cache.element_size() * keys * block_d),
        group=group,
        most_rows=triton.next_power_of_2(rows),
        page_size=page_size,
        has_copies=not has_tma,
        has_codes=k_scale is not None,
        has_boundaries=cu_seqlens_q is not None,
        has_left=window[0] >= 0,
        has_right=window[1] >= 0,
        has_softcap=softcap > 0,
        has_alibi=alibi_slopes is not None,
        has_sinks=sinks is not None,
        has_lse=lse is not None,
    )
    launch(
        decode_hopper_kernel,
        (programs,),
        out,
        lse,
        piece_out,
        piece_lse,
        counter(q.device, programs),
        q,
        *(descriptor(x, min(page_size, keys), block_d) if has_tma else x for x in caches),
        block_table,
        seqused_k,
        cu_seqlens_q,
        alibi_slopes,
        sinks,
        k_scale,
        v_scale,
        num_seqs,
        kv_heads,
        rows,
        *steps(out),
        *((0, 0) if lse is None else lse.stride()),
        *steps(q),
        *(step * x.element_size() // 16 for x in caches for step in steps(x)),
        *scale_strides(k_scale),
        *scale_strides(v_scale),
        block_table.stride(0),
        alibi_stride(alibi_slopes),
        *window,
        softmax_scale * _LOG2_E,
        softcap * _LOG2_E,
        S=shape,
        BLOCK_SEQS=block_seqs(num_seqs),
        num_warps=4,
        maxnreg=_REGISTERS,
        **early_launch(q.device),
    )
