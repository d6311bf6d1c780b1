"""Shares of the Hopper decode: which key tiles each program attends to, found on the device.

The key tiles of all sequences stand in a row, one sequence after the other, and for each KV head
the row is cut into equal shares, one for each program (work-centric attention: Stream-K, Osama et
al., 2023; LeanAttention, Sanovar et al., 2024). So all read the same amount, whatever the mix of
lengths, and every program finds its own share from the lengths alone. A cut that comes near an edge
of a sequence moves to that edge: a piece of a sequence costs a start and a merge. Where all are of
one length and there are nearly as many for each program, every cut does.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from echokernels._gluon_compat import aggregate


class DecodeShape(NamedTuple):
    """What the kernel knows at compile time, as one constexpr."""

    head_dim: int
    block_d: int  # head_dim or the power of two above it: columns beyond head_dim are zero
    block_n: int  # keys of a tile
    slots: int  # tiles of K, and of V, on their way
    group: int
    most_rows: int  # a power of two that `rows` does not exceed
    page_size: int
    has_copies: bool  # of rows, where TMA cannot put pages together
    has_codes: bool  # INT8, with scales
    has_boundaries: bool
    has_left: bool
    has_right: bool
    has_softcap: bool
    has_alibi: bool
    has_sinks: bool
    has_lse: bool


@aggregate
class DecodeCall:
    """Scalars and pointers of the call."""

    num_seqs: gl.tensor
    kv_heads: gl.tensor
    rows: gl.tensor  # (query, head of the group) of a sequence, at most
    window_left: gl.tensor
    window_right: gl.tensor
    scale: gl.tensor  # of scores, in base 2
    cap: gl.tensor  # in base 2
    q_ptr: gl.tensor
    q_stride_token: gl.tensor
    q_stride_head: gl.tensor
    seqused_k_ptr: gl.tensor  # [num_seqs]
    cu_seqlens_q_ptr: gl.tensor  # [num_seqs + 1]
    table_ptr: gl.tensor  # int[num_seqs, max_pages]
    table_stride: gl.tensor
    slopes_ptr: gl.tensor  # f32[heads] or [num_seqs, heads]
    slopes_stride: gl.tensor
    sinks_ptr: gl.tensor  # [heads]
    out_ptr: gl.tensor
    out_stride_token: gl.tensor
    out_stride_head: gl.tensor
    lse_ptr: gl.tensor
    lse_stride_head: gl.tensor
    lse_stride_token: gl.tensor
    piece_out_ptr: gl.tensor  # f32[shares, kv_heads, 2, rows, head_dim]
    piece_lse_ptr: gl.tensor  # f32[shares, kv_heads, 2, rows], in base 2
    counter_ptr: gl.tensor  # i32[shares, kv_heads], zeros
    S: gl.constexpr  # a DecodeShape

    @gluon.jit
    def lengths(self, seq, exists):
        """(first query token, queries, keys) of sequences; 0 of those that do not exist."""
        S: gl.constexpr = self.S
        k_len = gl.load(self.seqused_k_ptr + seq, mask=exists, other=0).to(gl.int32)
        start = seq
        q_len = seq * 0 + 1
        if S.has_boundaries:
            start = gl.load(self.cu_seqlens_q_ptr + seq, mask=exists, other=0).to(gl.int32)
            end = gl.load(self.cu_seqlens_q_ptr + seq + 1, mask=exists, other=0).to(gl.int32)
            q_len = end - start
        return start, q_len, k_len

    @gluon.jit
    def key_tiles(self, q_len, k_len):
        """(first, number) of the key tiles that any query sees."""
        S: gl.constexpr = self.S
        first = k_len * 0
        if S.has_left:
            first = gl.maximum(k_len - q_len - self.window_left, 0) // S.block_n
        return first, gl.cdiv(k_len, S.block_n) - first


@aggregate
class Shares:
    """Equal parts of all key tiles: the first `larger` have one more than `size`."""

    size: gl.tensor
    larger: gl.tensor
    near: gl.tensor  # a cut that is so near an edge of a sequence moves to it

    @gluon.jit
    def begin(self, share):
        return share * self.size + gl.minimum(share, self.larger)

    @gluon.jit
    def of(self, at):
        """The share in which a tile is."""
        wide = self.larger * (self.size + 1)
        behind = self.larger + (at - wide) // gl.maximum(self.size, 1)
        return gl.where(at < wide, at // (self.size + 1), behind)

    @gluon.jit
    def cuts_within(self, first, last):
        """(first, last) share that begins within tiles [first, last), away from its edges; the last
        before the first if none does."""
        return self.of(first + self.near) + 1, self.of(gl.maximum(last - self.near - 1, 0))


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _sum_max_sum(a0, a1, a2, b0, b1, b2):
    return a0 + b0, gl.maximum(a1, b1), a2 + b2


@gluon.jit
def share_of_program(call, BLOCK_SEQS: gl.constexpr):
    """(shares, sequence, tile of it, tile of all) at which the program's share begins, how many
    tiles it has, and whether any sequence has none."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    seq = gl.arange(0, BLOCK_SEQS, layout=layout)
    _, q_len, k_len = call.lengths(seq, seq < call.num_seqs)
    _, tiles = call.key_tiles(q_len, k_len)
    end = gl.associative_scan(tiles, 0, _add)
    present = (tiles > 0).to(gl.int32)
    total, longest, present = gl.reduce((tiles, tiles, present), 0, _sum_max_sum)
    count = gl.maximum(gl.minimum(gl.num_programs(0) // call.kv_heads, total), 1)
    size = total // count
    near = size // 8
    # All of one length, and nearly as many of them for each share.
    if (longest * present == total) & (gl.cdiv(present, count) * count * 32 <= present * 33):
        near = longest // 2
    shares = Shares(size, total - size * count, near)
    share = gl.program_id(0) // call.kv_heads
    at = _cut(share, shares, total, end, tiles)
    stop = _cut(share + 1, shares, total, end, tiles)
    begin, seq, _ = _holder(at, end, tiles)
    return shares, seq, at - begin, at, stop - at, present < call.num_seqs


@gluon.jit
def _holder(at, end, tiles):
    """(begin, number, tiles) of the sequence of a tile; zeros of none."""
    seq = gl.arange(0, end.shape[0], layout=end.type.layout)
    here = (end - tiles <= at) & (at < end)
    begin = gl.sum(gl.where(here, end - tiles, 0), 0)
    return begin, gl.sum(gl.where(here, seq, 0), 0), gl.sum(gl.where(here, tiles, 0), 0)


@gluon.jit
def _cut(share, shares, total, end, tiles):
    """Where a share begins; at the end of all if there is none."""
    at = gl.minimum(shares.begin(share), total)
    first, _, own = _holder(at, end, tiles)
    last = first + own
    if (at < total) & (gl.minimum(at - first, last - at) <= shares.near):
        at = gl.where(at - first <= last - at, first, last)
    return at
