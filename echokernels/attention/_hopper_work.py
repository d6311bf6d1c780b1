"""What each program of the Hopper prefill works on, and which key tiles that takes."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from echokernels._gluon_compat import aggregate
from echokernels.attention._hopper_memory import BLOCK_ROWS


@aggregate
class Call:
    """Scalars and pointers of the call."""

    records_ptr: gl.tensor  # i32[tiles, 8], see _prefill_schedule.py
    counts_ptr: gl.tensor
    num_items: gl.tensor  # tiles times heads
    heads: gl.tensor
    group: gl.tensor  # query heads of a KV head
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

    @gluon.constexpr_function
    def __init__(
        self, records_ptr, counts_ptr, num_items, heads, group, window_left, window_right, scale,
        cap, slopes_ptr, slopes_stride, sinks_ptr, table_ptr, table_stride, out_ptr,
        out_stride_token, out_stride_head, lse_ptr, lse_stride_head, lse_stride_token, S,
    ):  # fmt: skip
        self.records_ptr = records_ptr
        self.counts_ptr = counts_ptr
        self.num_items = num_items
        self.heads = heads
        self.group = group
        self.window_left = window_left
        self.window_right = window_right
        self.scale = scale
        self.cap = cap
        self.slopes_ptr = slopes_ptr
        self.slopes_stride = slopes_stride
        self.sinks_ptr = sinks_ptr
        self.table_ptr = table_ptr
        self.table_stride = table_stride
        self.out_ptr = out_ptr
        self.out_stride_token = out_stride_token
        self.out_stride_head = out_stride_head
        self.lse_ptr = lse_ptr
        self.lse_stride_head = lse_stride_head
        self.lse_stride_token = lse_stride_token
        self.S = gl.constexpr(S)


@aggregate
class Work:
    """One head of one query tile."""

    head: gl.tensor
    row: gl.tensor  # of the tile's first query in the packed tensor
    first: gl.tensor  # its number in the sequence
    q_len: gl.tensor
    k_start: gl.tensor  # row of the first key in packed keys
    k_len: gl.tensor
    seq: gl.tensor

    @gluon.constexpr_function
    def __init__(self, head, row, first, q_len, k_start, k_len, seq):
        self.head = head
        self.row = row
        self.first = first
        self.q_len = q_len
        self.k_start = k_start
        self.k_len = k_len
        self.seq = seq


@gluon.jit
def work_of(call, item):
    """Item number `item` of the list; the last one beyond its end."""
    S: gl.constexpr = call.S
    item = gl.maximum(gl.minimum(item, call.num_items - 1), 0)
    ptr = call.records_ptr + item // call.heads * 8
    before, tiles = gl.load(ptr), gl.load(ptr + 1)
    q_start, q_len = gl.load(ptr + 2), gl.load(ptr + 3)
    k_start, k_len = gl.load(ptr + 4), gl.load(ptr + 5)
    seq = gl.load(ptr + 6)
    # Of a sequence: `together` heads at a time, of these its tiles from the last to the first.
    item -= before * call.heads
    together = gl.load(ptr + 7) * call.group
    per_round = tiles * together
    first_head = item // per_round * together
    item -= first_head * tiles
    together = gl.minimum(together, call.heads - first_head)
    first = (tiles - 1 - item // together) * (S.consumers * BLOCK_ROWS)
    head = first_head + item % together
    return Work(head, q_start + first, first, q_len, k_start, k_len, seq)


@gluon.jit
def take_item(call):
    """The next item that no program has taken."""
    return gl.num_programs(0) + gl.atomic_add(call.counts_ptr + 1, 1, sem="relaxed")


@gluon.jit
def key_tiles(call, work):
    """(begin, end) of the key tiles that the query tile sees; at least one."""
    S: gl.constexpr = call.S
    shift = work.k_len - work.q_len
    end = work.k_len
    if S.has_right:
        last = work.first + S.consumers * BLOCK_ROWS + shift + call.window_right
        end = gl.minimum(end, last)
    end = gl.maximum(gl.cdiv(gl.maximum(end, 0), S.block_n), 1)
    begin = end * 0
    if S.has_left:
        first_key = gl.maximum(work.first + shift - call.window_left, 0)
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
        seen = gl.maximum(position + call.window_right + 1, 0)
        full_end = gl.minimum(full_end, seen // S.block_n)
    full_end = gl.maximum(gl.minimum(full_end, end - 1), begin)
    full_begin = begin
    if S.has_left:
        hidden = gl.maximum(position + BLOCK_ROWS - 1 - call.window_left, 0)
        full_begin = gl.minimum(gl.maximum(gl.cdiv(hidden, S.block_n), begin), full_end)
    if S.masks_all:
        full_begin, full_end = begin, begin
    return full_begin, full_end
