"""The prefill for Hopper, in Gluon: FlashAttention-3 (Shah et al., 2024) over ragged batches.

A program stays on its SM and takes one item of work after another, a head of a query tile, in an
order that all programs share (`_hopper_order`). One warp takes the items and loads by TMA
(`_hopper_memory`); two or three warpgroups, of 64 queries each, multiply by WGMMA
(`_hopper_consumer`, `_hopper_softmax`). What it computes is what the portable kernel in
`prefill.py` does; it takes fp16 and bf16 with head dims up to 256.
"""

from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from echokernels._launch import counter, launch, scratch
from echokernels._target import Target
from echokernels._tuning import TileConfig
from echokernels.attention._arguments import alibi_stride, scale_strides
from echokernels.attention._hopper_consumer import consume
from echokernels.attention._hopper_convert import (
    Scales,
    convert,
    make_scale_memory,
    prepare_scales,
)
from echokernels.attention._hopper_memory import (
    BLOCK_ROWS,
    Shape,
    load_page_ids,
    load_pages,
    load_rows,
    make_number_ring,
    make_page_loader,
    make_ring,
    make_rings_in_turns,
)
from echokernels.attention._hopper_order import (
    TABLE,
    WorkList,
    leave,
    list_kernel,
    make_lengths,
    make_table,
    take_item,
    work_of,
)
from echokernels.attention._hopper_tma import (
    GLUON_DTYPES,
    descriptor,
    fills_tiles,
    is_addressable,
    steps,
)
from echokernels.attention._hopper_work import Call, key_tiles, send_work

# Of a page: smaller ones take more loads than a warp has time for.
_LEAST_SLOTS = 16
# Each program of the list looks at all sequences.
_MOST_SEQS = 4096
# Keys and values that the L2 keeps while queries and outputs pass through it as well.
_L2_BYTES = 32 * 2**20
_LOG2_E = 1.4426950408889634


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, works, q_ring, k_ring, v_ring, counter_ptr, places, lengths, call
):  # fmt: skip
    """Takes items; loads the queries of each, and its key tiles from the last to the first."""
    S: gl.constexpr = call.S
    PAGE_SIZE: gl.constexpr = S.page_size
    used = 0
    turn = 0
    work = work_of(gl.program_id(0), places, lengths, call)
    send_work(works, turn, work)
    while work.seq >= 0:
        kv_head = work.head // call.group
        begin, end = key_tiles(call, work)
        next_work = work
        for i in range(end - begin):
            tile = end - 1 - i
            row = work.k_start + tile * S.block_n
            if PAGE_SIZE == 0:
                load_rows(k_desc, row, kv_head, k_ring, used)
            else:
                table_ptr = call.table_ptr + work.seq.to(gl.int64) * call.table_stride
                ids = load_page_ids(table_ptr, tile, work.k_len, PAGE_SIZE, S.block_n)
                full = k_ring.acquire(used)
                load_pages(k_desc, ids, tile, kv_head, k_ring.tile(used), full, PAGE_SIZE)
            if i == 0:
                _load_queries(q_desc, q_ring, turn, work, S)
            if PAGE_SIZE == 0:
                load_rows(v_desc, row, kv_head, v_ring, used)
            else:
                full = v_ring.acquire(used)
                load_pages(v_desc, ids, tile, kv_head, v_ring.tile(used), full, PAGE_SIZE)
            used += 1
            if i == gl.minimum(end - begin - 1, 1):
                # Now, for two tiles give the time that finding it takes.
                next_work = work_of(take_item(counter_ptr), places, lengths, call)
                send_work(works, turn + 1, next_work)
        turn += 1
        work = next_work
    leave(counter_ptr)


@gluon.jit
def _produce_codes(
    q_desc, k_desc, v_desc, works, q_ring, codes, counter_ptr, places, lengths, call
):  # fmt: skip
    """The same of codes, those of K and of V in turns."""
    S: gl.constexpr = call.S
    pages = make_page_loader(S.page_size, S.block_n)
    used = 0
    turn = 0
    work = work_of(gl.program_id(0), places, lengths, call)
    send_work(works, turn, work)
    while work.seq >= 0:
        kv_head = work.head // call.group
        table_ptr = call.table_ptr + work.seq.to(gl.int64) * call.table_stride
        begin, end = key_tiles(call, work)
        next_work = work
        numbers = pages.read(table_ptr, end - 1, work.k_len)
        for i in range(end - begin):
            tile = end - 1 - i
            pages.numbers.store(numbers)
            numbers = pages.read(table_ptr, gl.maximum(tile - 1, begin), work.k_len)
            pages.load(k_desc, tile, kv_head, codes, used)
            if i == 0:
                _load_queries(q_desc, q_ring, turn, work, S)
            pages.load(v_desc, tile, kv_head, codes, used + 1)
            used += 2
            if i == gl.minimum(end - begin - 1, 1):
                next_work = work_of(take_item(counter_ptr), places, lengths, call)
                send_work(works, turn + 1, next_work)
        turn += 1
        work = next_work
    leave(counter_ptr)


@gluon.jit
def _load_queries(q_desc, q_ring, turn, work, S: gl.constexpr):
    """After the first keys: the place of the queries is taken for longer."""
    CONSUMERS: gl.constexpr = S.consumers
    for c in gl.static_range(CONSUMERS):
        load_rows(q_desc, work.row + c * BLOCK_ROWS, work.head, q_ring, turn * CONSUMERS + c)


@gluon.jit
def _consume_0(out_desc, out_tiles, works, q_ring, k_ring, v_ring, scales, call):
    consume(0, out_desc, out_tiles, works, q_ring, k_ring, v_ring, scales, call)


@gluon.jit
def _consume_1(out_desc, out_tiles, works, q_ring, k_ring, v_ring, scales, call):
    consume(1, out_desc, out_tiles, works, q_ring, k_ring, v_ring, scales, call)


@gluon.jit
def _consume_2(out_desc, out_tiles, works, q_ring, k_ring, v_ring, scales, call):
    consume(2, out_desc, out_tiles, works, q_ring, k_ring, v_ring, scales, call)


# Index tensors may be slices at any offset of larger buffers: their alignment varies at run time.
@gluon.jit(
    do_not_specialize=[
        "cu_seqlens_q_ptr", "cu_seqlens_k_ptr", "seqused_k_ptr", "num_seqs", "most_keys",
        "keys_in_l2", "window_left", "window_right", "table_ptr", "table_stride", "heads", "group",
        "lse_stride_head", "lse_stride_token", "slopes_stride", "k_scale_ptr", "v_scale_ptr",
        "k_scale_stride_page", "k_scale_stride_slot", "k_scale_stride_head", "v_scale_stride_page",
        "v_scale_stride_slot", "v_scale_stride_head",
    ]
)  # fmt: skip
def _prefill_hopper_kernel(
    out_ptr,  # [tokens, heads, head_dim]
    lse_ptr,  # f32[heads, tokens], or None
    out_desc,  # of the same as out_ptr
    q_desc,  # [tokens, heads, head_dim]
    k_desc,  # [keys, kv_heads, head_dim], or [num_pages, page_size, kv_heads, head_dim]
    v_desc,
    counter_ptr,  # i32[2], zeros
    records_ptr,  # i32[num_tiles, 2], or None: a list is not needed
    num_tiles_ptr,  # i32[1], or None
    cu_seqlens_q_ptr,  # [num_seqs + 1]
    cu_seqlens_k_ptr,  # [num_seqs + 1], or None
    seqused_k_ptr,  # [num_seqs], or None
    table_ptr,  # [num_seqs, max_pages], or None
    slopes_ptr,  # f32[heads] or [num_seqs, heads], or None
    sinks_ptr,  # [heads], or None
    k_scale_ptr,  # f32[num_pages, page_size, kv_heads] of codes, or None
    v_scale_ptr,
    k_scale_stride_page,
    k_scale_stride_slot,
    k_scale_stride_head,
    v_scale_stride_page,
    v_scale_stride_slot,
    v_scale_stride_head,
    num_seqs,
    most_keys,  # that a query tile sees
    heads,
    group,
    keys_in_l2,
    out_stride_token,
    out_stride_head,
    lse_stride_head,
    lse_stride_token,
    table_stride,
    slopes_stride,
    window_left,
    window_right,
    scale,
    cap,
    S: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
    CONVERTER_REGISTERS: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    q_ring = make_ring(dtype, S.consumers * S.q_slots, BLOCK_ROWS, S.block_d, 1)
    out_tiles = q_ring.tiles
    if S.stages_output:
        out_tiles = gl.allocate_shared_memory(
            dtype, [S.consumers, BLOCK_ROWS, S.block_d], q_ring.tiles.layout
        )
    works = make_number_ring(8, S.consumers + 2 * S.has_codes)
    # A pointer that is absent is not used: any other takes its place.
    call = Call(
        heads, group, keys_in_l2, window_left, window_right, scale, cap,
        slopes_ptr if S.has_alibi else cu_seqlens_q_ptr, slopes_stride,
        sinks_ptr if S.has_sinks else cu_seqlens_q_ptr,
        table_ptr if S.page_size > 0 else cu_seqlens_q_ptr, table_stride,
        out_ptr, out_stride_token, out_stride_head,
        lse_ptr if S.has_lse else cu_seqlens_q_ptr, lse_stride_head, lse_stride_token, S,
    )  # fmt: skip
    lengths = make_lengths(
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr, num_seqs, most_keys, S
    )
    places = WorkList(records_ptr, gl.load(num_tiles_ptr)) if S.has_list else make_table(lengths)
    if S.has_codes:
        k_ring, v_ring = make_rings_in_turns(gl.float16, S.slots, S.block_n, S.block_d, S.consumers)
        # Codes and their scales arrive.
        codes = make_ring(gl.int8, S.code_slots, S.block_n, S.block_d, 1, 2)
        scale_tiles, units = make_scale_memory(S.code_slots, S.slots, S.block_n)
        scales = Scales(
            k_scale_ptr, k_scale_stride_page, k_scale_stride_slot, k_scale_stride_head,
            v_scale_ptr, v_scale_stride_page, v_scale_stride_slot, v_scale_stride_head,
            scale_tiles, units,
        )  # fmt: skip
        uses = (out_desc, out_tiles, works, q_ring, k_ring, v_ring, scales, call)
        code_loads = (
            q_desc, k_desc, v_desc, works, q_ring, codes, counter_ptr, places, lengths, call
        )  # fmt: skip
        gl.warp_specialize(
            [
                (_consume_0, uses),
                (_consume_1, uses),
                (convert, (works, codes, scales, k_ring, v_ring, call)),
                (_produce_codes, code_loads),
                (prepare_scales, (works, codes, scales, call)),
            ],
            [4, 4, 1, 1],
            [CONSUMER_REGISTERS, CONVERTER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS],
        )
    else:
        k_ring = make_ring(dtype, S.slots, S.block_n, S.block_d, S.consumers)
        v_ring = make_ring(dtype, S.slots, S.block_n, S.block_d, S.consumers)
        uses = (out_desc, out_tiles, works, q_ring, k_ring, v_ring, works, call)
        loads = (
            q_desc, k_desc, v_desc, works, q_ring, k_ring, v_ring, counter_ptr, places, lengths,
            call,
        )  # fmt: skip
        if S.consumers == 2:
            gl.warp_specialize(
                [(_consume_0, uses), (_consume_1, uses), (_produce, loads)],
                [4, 1],
                [CONSUMER_REGISTERS, LOADER_REGISTERS],
            )
        else:
            gl.warp_specialize(
                [(_consume_0, uses), (_consume_1, uses), (_consume_2, uses), (_produce, loads)],
                [4, 4, 1],
                [CONSUMER_REGISTERS, CONSUMER_REGISTERS, LOADER_REGISTERS],
            )


# Registers of a consumer's and of the loading warp's threads, multiples of 8. With the three idle
# warps beside that one they make what the launch took: 168 a thread of 12 warps, 128 of 16.
_REGISTERS = {2: (232, 40), 3: (160, 32)}
# The same of codes, and of a converting warp's, of 16 warps.
_REGISTERS_OF_CODES = 208, 32, 64
# Tiles of codes on their way, of K and V in turns.
_CODE_SLOTS = 4


def config(head_dim: int, has_codes: bool) -> TileConfig:
    """block_m queries by block_n keys; num_stages tiles of K and of V on their way."""
    block_d = _block_d(head_dim, has_codes)
    # A small head leaves room for the registers of three consumers.
    return TileConfig(
        block_m=(3 if block_d == 64 else 2) * BLOCK_ROWS.value,
        block_n=64 if block_d == 256 else 128,
        num_stages=4 if block_d == 64 else 2,
    )


def _block_d(head_dim: int, has_codes: bool) -> int:
    """Small heads of codes are as wide as large ones: a tile that converts fast is."""
    return max(triton.next_power_of_2(head_dim), 128 if has_codes else 0)


def can_run(
    target: Target,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    num_seqs: int,
    block_table: torch.Tensor | None,
    softmax_scale: float,
) -> bool:
    """Whether the kernel takes this call: what TMA cannot address is left to the portable one."""
    if (
        not target.runs_hopper_kernels
        or q.dtype not in GLUON_DTYPES
        or (k.dtype != q.dtype and not _converts(k.dtype, q.shape[-1]))
    ):
        return False
    head_dim = q.shape[-1]
    if k.shape[0] == 0 or num_seqs > _MOST_SEQS:
        return False
    if not 32 < head_dim <= 256 or head_dim % 8 or softmax_scale <= 0:
        return False
    if block_table is not None:
        page_size, block_n = k.shape[1], config(head_dim, k.dtype != q.dtype).block_n
        if page_size < _LEAST_SLOTS or not fills_tiles(page_size, block_n):
            return False
    return all(is_addressable(x) for x in (q, k, v, out))


def _converts(codes: torch.dtype, head_dim: int) -> bool:
    """Tiles of larger heads leave no shared memory for codes."""
    return codes == torch.int8 and head_dim <= 128


def launch_hopper(
    tile: TileConfig,
    target: Target,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
    softmax_scale: float,
    window: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """window: (left, right), -1 for all."""
    heads, head_dim = q.shape[1:]
    num_seqs = cu_seqlens_q.shape[0] - 1
    most_keys = sum(window) + tile.block_m if min(window) >= 0 else 2**30
    shape = Shape(
        **_sizes(tile, head_dim, 0 if block_table is None else k.shape[1], k_scale is not None),
        has_left=window[0] >= 0,
        has_right=window[1] >= 0,
        has_softcap=softcap > 0,
        has_alibi=alibi_slopes is not None,
        has_sinks=sinks is not None,
        has_lse=lse is not None,
        # With softcap and a window a loop without masks would not fit the registers.
        masks_all=softcap > 0 and window[0] >= 0,
        has_list=num_seqs > TABLE.value,
        has_cu_seqlens_k=cu_seqlens_k is not None,
        has_seqused_k=seqused_k is not None,
    )
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_k)
    records = num_tiles = None
    if shape.has_list:
        records = scratch((q.shape[0] // tile.block_m + num_seqs, 2), torch.int32, q.device)
        num_tiles = scratch((1,), torch.int32, q.device)
        grid = (triton.cdiv(num_seqs, TABLE.value),)
        launch(
            list_kernel, grid, records, num_tiles, *lengths, num_seqs, most_keys, S=shape,
            num_warps=4,
        )  # fmt: skip
    key_rows = min(shape.page_size or tile.block_n, tile.block_n)
    registers = _REGISTERS_OF_CODES if shape.has_codes else (*_REGISTERS[shape.consumers], 0)
    consumer_registers, loader_registers, converter_registers = registers
    launch(
        _prefill_hopper_kernel,
        (target.num_sms,),
        out,
        lse,
        *(descriptor(x, BLOCK_ROWS.value, shape.block_d) for x in (out, q)),
        *(descriptor(x, key_rows, shape.block_d) for x in (k, v)),
        counter(q.device, 2),
        records,
        num_tiles,
        *lengths,
        block_table,
        alibi_slopes,
        sinks,
        k_scale,
        v_scale,
        *scale_strides(k_scale),
        *scale_strides(v_scale),
        num_seqs,
        most_keys,
        heads,
        heads // k.shape[-2],
        _L2_BYTES // (2 * head_dim * k.element_size()),
        *steps(out),
        *((0, 0) if lse is None else lse.stride()),
        0 if block_table is None else block_table.stride(0),
        alibi_stride(alibi_slopes),
        *window,
        softmax_scale * _LOG2_E,
        softcap * _LOG2_E,
        S=shape,
        CONSUMER_REGISTERS=consumer_registers,
        LOADER_REGISTERS=loader_registers,
        CONVERTER_REGISTERS=converter_registers,
        num_warps=4,
    )


def _sizes(tile: TileConfig, head_dim: int, page_size: int, has_codes: bool) -> dict[str, Any]:
    """Those of a Shape."""
    block_d = _block_d(head_dim, has_codes)
    return {
        "head_dim": head_dim,
        "block_d": block_d,
        "block_n": tile.block_n,
        "slots": tile.num_stages,
        # A consumer that is done first need not wait for the queries of the last.
        "q_slots": 2 if block_d == 64 else 1,
        "consumers": tile.block_m // BLOCK_ROWS.value,
        "page_size": page_size,
        # Else there is no shared memory left.
        "stages_output": block_d < 256 and not has_codes,
        "has_codes": has_codes,
        "code_slots": _CODE_SLOTS,
    }
