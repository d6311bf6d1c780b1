"""The two sides of the Hopper decode: warps that load key tiles, and a warpgroup that attends.

The queries of a sequence and KV head are few, and WGMMA multiplies 64 rows at least. So the keys
are its rows: scores come as K q^T [keys, queries] and outputs as V^T p [head dim, queries], both
from shared memory, with as many columns as there are queries (8 at least). Keys and values never
pass through registers.

The key tiles of all sequences stand in a row, and for each KV head a program has one share of it.
The ring of tiles does not care where one sequence ends and the next begins, so memory is read
without a pause. The programs of one share read the same pages at the same time, each for its head:
neighbours in memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from echokernels.attention._hopper_memory import (
    accumulator_layout,
    load_page_ids,
    load_pages,
    zero_rows,
)
from echokernels.attention._hopper_pieces import (
    columns,
    fill_empty,
    finish,
    rows_of,
)

_LOG2_E = gl.constexpr(1.4426950408889634)
_NOTHING = gl.constexpr(float("-inf"))


@gluon.jit
def produce(desc, ring, seq, tile, left, call):
    """Loads the tiles of K, or of V, of a share."""
    S: gl.constexpr = call.S
    kv_head = gl.program_id(0) % call.kv_heads
    used = 0
    while left > 0:
        _, q_len, k_len = call.lengths(seq, seq < call.num_seqs)
        first, tiles = call.key_tiles(q_len, k_len)
        table_ptr = call.table_ptr + seq.to(gl.int64) * call.table_stride
        count = gl.minimum(tiles - tile, left)
        ids = load_page_ids(table_ptr, first + tile, k_len, S.page_size, S.block_n)
        for i in range(count):
            at = first + tile + i
            # The table is read while the tile before waits for its place.
            next_ids = load_page_ids(table_ptr, at + 1, k_len, S.page_size, S.block_n)
            full = ring.acquire(used)
            load_pages(desc, ids, at, kv_head, ring.tile(used), full, S.page_size)
            ids = next_ids
            used += 1
        left -= count
        tile = 0
        seq += 1


@gluon.jit
def make_operands(dtype: gl.constexpr, S: gl.constexpr):
    """Shared memory of the queries and the weights, of which WGMMA takes both."""
    R: gl.constexpr = columns(S.most_rows)
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([R, S.block_d], dtype)
    P_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([R, S.block_n], dtype)
    q_tile = gl.allocate_shared_memory(dtype, [R, S.block_d], Q_LAYOUT)
    return q_tile, gl.allocate_shared_memory(dtype, [R, S.block_n], P_LAYOUT)


@gluon.jit
def consume(k_ring, v_ring, operands, shares, seq, tile, at, left, has_empty, call):
    """Attends to the tiles of a share."""
    if has_empty:
        fill_empty(call)
    q_tile, p_tile = operands
    kv_head = gl.program_id(0) % call.kv_heads
    used = 0
    while left > 0:
        start, q_len, k_len = call.lengths(seq, seq < call.num_seqs)
        first, tiles = call.key_tiles(q_len, k_len)
        count = gl.minimum(tiles - tile, left)
        if count > 0:
            _load_queries(q_tile, start, q_len, kv_head, call)
            acc, m, l, used = _attend(
                k_ring, v_ring, q_tile, p_tile, used, first + tile, count, seq, kv_head, q_len,
                k_len, call,
            )  # fmt: skip
            l = gl.sum(l, 0)
            finish(acc, m, l, tile, count, tiles, at, shares, start, q_len, kv_head, call)
        left -= count
        at += count
        tile = 0
        seq += 1


@gluon.jit
def _load_queries(q_tile, start, q_len, kv_head, call):
    S: gl.constexpr = call.S
    D: gl.constexpr = S.block_d
    ACROSS: gl.constexpr = min(D // 8, 32)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    token, member, used = rows_of(q_len, call, columns(S.most_rows), gl.SliceLayout(1, layout))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, layout))[None, :]
    ptr = call.q_ptr + (kv_head * S.group + member).to(gl.int64) * call.q_stride_head
    ptr += (start + token).to(gl.int64) * call.q_stride_token
    q = gl.load(ptr[:, None] + d, mask=used[:, None] & (d < S.head_dim), other=0.0)
    q_tile.store(q)
    fence_async_shared()


@gluon.jit
def _attend(k_ring, v_ring, q_tile, p_tile, used, first, count, seq, kv_head, q_len, k_len, call):
    """(accumulator f32[block_d, columns], largest score, sum of weights f32[block_n, columns], used
    slots) after `count` tiles from the `first`."""
    S: gl.constexpr = call.S
    D: gl.constexpr = S.block_d
    N: gl.constexpr = S.block_n
    R: gl.constexpr = columns(S.most_rows)
    L: gl.constexpr = accumulator_layout(R)
    COLUMN: gl.constexpr = gl.SliceLayout(0, L)
    token, member, exists = rows_of(q_len, call, columns(S.most_rows), COLUMN)
    position = k_len - q_len + token
    last = position * 0 + k_len - 1
    if S.has_right:
        last = gl.minimum(last, position + call.window_right)
    slope = position.to(gl.float32)
    if S.has_alibi:
        ptr = call.slopes_ptr + seq.to(gl.int64) * call.slopes_stride + kv_head * S.group
        slope = gl.load(ptr + member, mask=exists, other=0.0) * _LOG2_E
    key = gl.arange(0, N, layout=gl.SliceLayout(1, L))[:, None]
    acc = gl.zeros([D, R], gl.float32, L)
    m = gl.full([R], _NOTHING, gl.float32, COLUMN)
    l = gl.zeros([N, R], gl.float32, L)
    zero = gl.zeros([N, R], gl.float32, L)
    for i in range(count):
        begin = (first + i) * N
        k_ring.wait_full(used)
        if S.has_copies:
            fence_async_shared()
        scores = warpgroup_mma(
            k_ring.tile(used), q_tile.permute((1, 0)), zero, use_acc=False, is_async=True
        )
        s = warpgroup_mma_wait(0, [scores])
        k_ring.release(used)
        if S.has_softcap:
            # cap * tanh(s * scale / cap); an exponential that overflows gives 1.
            twice = 2.0 * _LOG2_E * call.scale / call.cap
            s = call.cap - 2.0 * call.cap / (1.0 + gl.exp2(s * twice))
        else:
            s = s * call.scale
        if S.has_alibi:
            s -= slope[None, :] * gl.abs(position[None, :] - begin - key).to(gl.float32)
        seen = key <= (last - begin)[None, :]
        if S.has_left:
            seen = seen & (key >= (position - call.window_left - begin)[None, :])
        s = gl.where(seen, s, _NOTHING)
        top = gl.maximum(m, gl.max(s, 0))
        # A row that has seen no key yet: 0 makes every exponential 0, not NaN.
        finite = gl.where(top == _NOTHING, 0.0, top)
        p = gl.exp2(s - finite[None, :])
        alpha = gl.exp2(m - finite)
        m = top
        l = l * alpha[None, :] + p
        p_tile.permute((1, 0)).store(p.to(q_tile.dtype))
        fence_async_shared()
        v_ring.wait_full(used)
        v = v_ring.tile(used)
        if S.has_copies:
            fence_async_shared()
        elif k_len - begin < N:
            zero_rows(v, k_len - begin)
        product = warpgroup_mma(
            v.permute((1, 0)), p_tile.permute((1, 0)), acc * alpha[None, :], is_async=True
        )
        acc = warpgroup_mma_wait(0, [product])
        v_ring.release(used)
        used += 1
    return acc, m, l, used
