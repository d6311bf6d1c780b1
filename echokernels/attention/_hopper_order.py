"""The order in which programs of the Hopper prefill take query tiles.

Sequences with most keys come first and, of a sequence, the tiles that see most, so that what is
left at the end is small, whatever the mix of lengths (longest processing time first; Graham, 1969).
The tiles of one sequence stay together, and so do those of a few of its heads where the keys and
values of all would not fit the L2: programs that run at the same time read the same keys.

Lengths never come to the host. Of a batch of up to TABLE sequences every program finds out for
itself where each stands (`Table`), which takes time with the square of the batch. For a larger one
a kernel before writes it down (`WorkList`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from echokernels._gluon_compat import aggregate
from echokernels.attention._hopper_memory import BLOCK_ROWS
from echokernels.attention._hopper_work import Work

TABLE = gl.constexpr(128)
"""Sequences of a batch that needs no list."""

_CHUNK = gl.constexpr(16)


@aggregate
class Lengths:
    """Of all sequences."""

    cu_seqlens_q_ptr: gl.tensor  # [num_seqs + 1]
    cu_seqlens_k_ptr: gl.tensor  # [num_seqs + 1]
    seqused_k_ptr: gl.tensor  # [num_seqs]
    num_seqs: gl.tensor
    most_keys: gl.tensor  # that a query tile sees
    S: gl.constexpr  # a Shape

    @gluon.jit
    def queries(self, seq):
        """(first row, number) of sequences; 0 of those that do not exist."""
        exists = seq < self.num_seqs
        start = gl.load(self.cu_seqlens_q_ptr + seq, mask=exists, other=0).to(gl.int32)
        end = gl.load(self.cu_seqlens_q_ptr + seq + 1, mask=exists, other=0).to(gl.int32)
        return start, end - start

    @gluon.jit
    def keys(self, seq):
        """The same of keys. In pages the first row is 0."""
        S: gl.constexpr = self.S
        exists = seq < self.num_seqs
        start = seq * 0
        if S.has_cu_seqlens_k:
            start = gl.load(self.cu_seqlens_k_ptr + seq, mask=exists, other=0).to(gl.int32)
        if S.has_seqused_k:
            count = gl.load(self.seqused_k_ptr + seq, mask=exists, other=0).to(gl.int32)
        else:
            end = gl.load(self.cu_seqlens_k_ptr + seq + 1, mask=exists, other=0).to(gl.int32)
            count = end - start
        return start, count

    @gluon.jit
    def tiles(self, q_len):
        S: gl.constexpr = self.S
        return gl.cdiv(q_len, S.consumers * BLOCK_ROWS)

    @gluon.jit
    def seen(self, k_len):
        """Keys that a query tile sees, at most."""
        return gl.minimum(k_len, self.most_keys)


@gluon.jit
def make_lengths(
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr, num_seqs, most_keys, S: gl.constexpr
):
    # A pointer that is absent is not used: any other takes its place.
    return Lengths(
        cu_seqlens_q_ptr,
        cu_seqlens_k_ptr if S.has_cu_seqlens_k else cu_seqlens_q_ptr,
        seqused_k_ptr if S.has_seqused_k else cu_seqlens_q_ptr,
        num_seqs, most_keys, S,
    )  # fmt: skip


@aggregate
class Table:
    """Where each sequence stands, in shared memory."""

    before: gl.shared_memory_descriptor  # i32[TABLE]: query tiles of the sequences before it
    tiles: gl.shared_memory_descriptor  # i32[TABLE]: its own
    num_tiles: gl.tensor  # of all

    @gluon.jit
    def find(self, place):
        """(sequence, tiles before it) of the tile that stands at `place`; (0, 0) of none."""
        layout: gl.constexpr = gl.BlockedLayout([TABLE // 32], [32], [gl.num_warps()], [0])
        before, tiles = self.before.load(layout), self.tiles.load(layout)
        here = (before <= place) & (place < before + tiles)
        seq = gl.sum(gl.where(here, gl.arange(0, TABLE, layout=layout), 0), 0)
        return seq, gl.sum(gl.where(here, before, 0), 0)


@aggregate
class WorkList:
    """The same for each tile, in global memory."""

    records_ptr: gl.tensor  # i32[num_tiles, 2]: sequence, tiles before it
    num_tiles: gl.tensor

    @gluon.jit
    def find(self, place):
        ptr = self.records_ptr + place.to(gl.int64) * 2
        exists = place < self.num_tiles
        return gl.load(ptr, mask=exists, other=0), gl.load(ptr + 1, mask=exists, other=0)


@gluon.jit
def make_table(lengths):
    before, tiles, num_tiles = _places(0, lengths)
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return Table(
        gl.allocate_shared_memory(gl.int32, [TABLE], LAYOUT, before),
        gl.allocate_shared_memory(gl.int32, [TABLE], LAYOUT, tiles),
        num_tiles,
    )


@gluon.jit(
    do_not_specialize=[
        "cu_seqlens_q_ptr", "cu_seqlens_k_ptr", "seqused_k_ptr", "num_seqs", "most_keys",
    ]
)  # fmt: skip
def list_kernel(
    records_ptr,  # i32[at least num_tiles, 2], out
    num_tiles_ptr,  # i32[1], out
    cu_seqlens_q_ptr,  # [num_seqs + 1]
    cu_seqlens_k_ptr,  # [num_seqs + 1], or None
    seqused_k_ptr,  # [num_seqs], or None
    num_seqs,
    most_keys,
    S: gl.constexpr,
):
    """Writes the records of TABLE sequences a program."""
    lengths = make_lengths(
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr, num_seqs, most_keys, S
    )
    first = gl.program_id(0) * TABLE
    before, tiles, num_tiles = _places(first, lengths)
    seq = first + gl.arange(0, TABLE, layout=before.type.layout)
    for i in range(gl.max(tiles, 0)):
        ptr = records_ptr + (before + i).to(gl.int64) * 2
        gl.store(ptr, seq, mask=i < tiles)
        gl.store(ptr + 1, before, mask=i < tiles)
    if first == 0:
        gl.store(num_tiles_ptr, num_tiles)


@gluon.jit
def _places(first, lengths):
    """Of the TABLE sequences from `first` on: (tiles before each, its own), and of all, tiles."""
    PAIRS: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [gl.num_warps(), 1], [0, 1])
    seq = first + gl.arange(0, TABLE, layout=gl.SliceLayout(1, PAIRS))
    tiles, keys = _tiles_and_keys(seq, lengths)
    before = tiles * 0
    num_tiles = first * 0
    for start in range(0, lengths.num_seqs, _CHUNK):
        other = start + gl.arange(0, _CHUNK, layout=gl.SliceLayout(0, PAIRS))
        other_tiles, other_keys = _tiles_and_keys(other, lengths)
        comes_first = (other_keys[None, :] > keys[:, None]) | (
            (other_keys[None, :] == keys[:, None]) & (other[None, :] < seq[:, None])
        )
        before += gl.sum(gl.where(comes_first, other_tiles[None, :], 0), 1)
        num_tiles += gl.sum(other_tiles, 0)
    return before, tiles, num_tiles


@gluon.jit
def _tiles_and_keys(seq, lengths):
    _, q_len = lengths.queries(seq)
    _, k_len = lengths.keys(seq)
    return lengths.tiles(q_len), lengths.seen(k_len)


@gluon.jit
def take_item(counter_ptr):
    """The next item that no program has taken."""
    return gl.num_programs(0) + gl.atomic_add(counter_ptr, 1, sem="relaxed")


@gluon.jit
def leave(counter_ptr):
    """Takes no more. The last program to leave sets the counter back."""
    if gl.atomic_add(counter_ptr + 1, 1) == gl.num_programs(0) - 1:
        gl.store(counter_ptr, 0)
        gl.store(counter_ptr + 1, 0)


@gluon.jit
def work_of(item, places, lengths, call):
    """Item number `item` of all: a tile's place in the order, and a head."""
    S: gl.constexpr = call.S
    BLOCK_M: gl.constexpr = S.consumers * BLOCK_ROWS
    seq, before = places.find(item // call.heads)
    q_start, q_len = lengths.queries(seq)
    k_start, k_len = lengths.keys(seq)
    tiles = lengths.tiles(q_len)
    # Heads that are worked on together; of these, the tiles from the last to the first.
    kv_heads = call.heads // call.group
    fit = gl.maximum(call.keys_in_l2 // gl.maximum(lengths.seen(k_len), 1), 1)
    together = gl.cdiv(kv_heads, gl.cdiv(kv_heads, fit)) * call.group
    rest = item - before * call.heads
    first_head = rest // gl.maximum(tiles * together, 1) * together
    rest -= first_head * tiles
    together = gl.minimum(together, call.heads - first_head)
    first = (tiles - 1 - rest // together) * BLOCK_M
    head = first_head + rest % together
    position = first + k_len - q_len
    seq = gl.where(item < places.num_tiles * call.heads, seq, -1)
    return Work(head, q_start + first, q_len - first, position, k_start, k_len, seq)
