"""What each program of the Hopper prefill works on, and which key tiles that takes."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from echokernels._gluon_compat import aggregate
from echokernels.attention._hopper_memory import BLOCK_ROWS, number_of


@aggregate
class Call:
    """Scalars and pointers of the call."""

    heads: gl.tensor
    group: gl.tensor  # query heads of a KV head
    keys_in_l2: gl.tensor  # of one KV head
    window_left: gl.tensor
    window_right: gl.tensor
    scale: gl.tensor  # of scores, in base 2
    cap: gl.tensor  # in base 2
    slopes_ptr: gl.tensor  # f32[heads] or [num_seqs, heads]
    slopes_stride: gl.tensor
    sinks_ptr: gl.tensor  # [heads]
    table_ptr: gl.tensor  # int[num_seqs, max_pages]
    table_stride: gl.tensor
    out_ptr: gl.tensor
    out_stride_token: gl.tensor
    out_stride_head: gl.tensor
    lse_ptr: gl.tensor
    lse_stride_head: gl.tensor
    lse_stride_token: gl.tensor
    S: gl.constexpr  # a Shape


@aggregate
class Work:
    """One head of one query tile."""

    head: gl.tensor
    row: gl.tensor  # of the tile's first query in the packed tensor
    rows: gl.tensor  # of the sequence from there on
    position: gl.tensor  # of the first query, counted in keys
    k_start: gl.tensor  # row of the first key in packed keys
    k_len: gl.tensor
    seq: gl.tensor  # -1: there is no more work


@gluon.jit
def send_work(ring, use, work):
    """From the loading warp to all consumers."""
    i = gl.arange(0, 8, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    numbers = gl.where(i == 0, work.head, work.row)
    numbers = gl.where(i == 2, work.rows, numbers)
    numbers = gl.where(i == 3, work.position, numbers)
    numbers = gl.where(i == 4, work.k_start, numbers)
    numbers = gl.where(i == 5, work.k_len, numbers)
    numbers = gl.where(i == 6, work.seq, numbers)
    ring.send(use, numbers)


@gluon.jit
def receive_work(ring, use):
    numbers = ring.receive(use)
    return Work(
        number_of(numbers, 0), number_of(numbers, 1), number_of(numbers, 2), number_of(numbers, 3),
        number_of(numbers, 4), number_of(numbers, 5), number_of(numbers, 6),
    )  # fmt: skip


@gluon.jit
def key_tiles(call, work):
    """(begin, end) of the key tiles that the query tile sees; at least one."""
    S: gl.constexpr = call.S
    end = work.k_len
    if S.has_right:
        last = work.position + S.consumers * BLOCK_ROWS + call.window_right
        end = gl.minimum(end, last)
    end = gl.maximum(gl.cdiv(gl.maximum(end, 0), S.block_n), 1)
    begin = end * 0
    if S.has_left:
        first_key = gl.maximum(work.position - call.window_left, 0)
        begin = gl.minimum(first_key // S.block_n, end - 1)
    return begin, end


@gluon.jit
def own_end(call, position, begin, end):
    """The end of the key tiles that a consumer's rows see, the first at key `position`; at least
    one tile is theirs."""
    S: gl.constexpr = call.S
    if S.has_right:
        seen = gl.maximum(position + BLOCK_ROWS + call.window_right, 0)
        end = gl.maximum(gl.minimum(end, gl.cdiv(seen, S.block_n)), begin + 1)
    return end


@gluon.jit
def unmasked_tiles(call, work, position, begin, end):
    """(begin, end) of the key tiles in which a consumer's rows, the first at key `position`, see
    every key. The last of all tiles is never among them."""
    S: gl.constexpr = call.S
    full_end = work.k_len // S.block_n
    if S.has_right:
        # Without the tile of the last key that the first row sees: when these begin, every row has
        # seen a key.
        last = gl.maximum(position + call.window_right, 0)
        full_end = gl.minimum(full_end, last // S.block_n)
    full_end = gl.maximum(gl.minimum(full_end, end - 1), begin)
    full_begin = begin
    if S.has_left:
        hidden = gl.maximum(position + BLOCK_ROWS - 1 - call.window_left, 0)
        full_begin = gl.minimum(gl.maximum(gl.cdiv(hidden, S.block_n), begin), full_end)
    if S.masks_all:
        full_begin, full_end = begin, begin
    return full_begin, full_end
