"""The softmax of the Hopper prefill: the scores of a key tile become weights, in registers.

Weights are exponentials of scores less a base, one for each row. With the running maximum as the
base, every tile needs its maximum and scales down what was accumulated so far. But any base will do
that keeps weights in range. So in the tiles that need no mask, which are nearly all of a long
sequence, the base stays what it is (`weigh_on`) until the weights of a row add up to more than
LIMIT; only then it becomes the maximum. (FlashAttention-4 also puts off scaling, but still takes
every maximum.)

A warp has 16 rows. Of a row, four threads hold two columns of every eight. What belongs to a row
they all hold, [rows, 4]; of its sum each holds a part.
"""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from echokernels.attention._hopper_memory import BLOCK_ROWS

NOTHING = gl.constexpr(float("-inf"))
"""The score of a key that is not seen."""

LIMIT = gl.constexpr(256.0)
"""Of what one thread adds up of a row's weights in a tile. Fp16 holds 256 times as much."""

LIMIT_OF_CODES = gl.constexpr(65504.0)
"""The same where values are converted codes: the largest fp16, which weights then are."""

HEADROOM = gl.constexpr(14)
"""Where values are converted codes: log2 of a row's largest weight in its first tile, and of what a
row's weights in a tile add up to when its base grows. Values are in units of their tile then, so a
small weight may be that of a large value, and a large one that of a sink, which has hardly any:
weights need all of fp16's range."""

# In PTX: the halves of an int32.
_LOW = gl.constexpr("{ .reg .b16 other; mov.b32 {$0, other}, $1; }")
_HIGH = gl.constexpr("{ .reg .b16 other; mov.b32 {other, $0}, $1; }")


@gluon.jit
def of_threads(x):
    """[rows, columns] as [rows, columns / 8, 4, 2]."""
    return gl.reshape(x, [BLOCK_ROWS, x.shape[1] // 8, 4, 2])


@gluon.constexpr_function
def row_layout(layout):
    """Of [rows, 4], for x of `of_threads` with `layout`."""
    return gl.SliceLayout(1, gl.SliceLayout(3, layout))


@gluon.jit
def weigh(s, base, scale, lift, S: gl.constexpr, dtype: gl.constexpr):
    """(packed weights, their sums, new base, its growth) of scores `of_threads` that may be
    masked.

    scale: what they are multiples of, of each row if S.has_codes; not used with softcap or ALiBi.
    lift: log2 of what the values of the tile are multiples of; used if S.has_codes.
    """
    ROWS: gl.constexpr = base.type.layout
    top = per_row(gl.max(gl.max(gl.max(s, 3), 1), 1), ROWS)
    if not (S.has_softcap or S.has_alibi):
        top = top * scale
        s = s * _spread(scale, S)  # one instruction with the subtraction below
    if S.has_codes:
        top += lift - HEADROOM
    top = gl.maximum(base, top)
    # A row that has seen no key yet: 0 makes every exponential 0, not NaN.
    finite = gl.where(top == NOTHING, 0.0, top)
    p = gl.exp2(s - per_column(_less(finite, lift, S)))
    return _packed(p, dtype), _lowered(_sum_of_thread(p), lift, S), top, finite - base


@gluon.jit
def weigh_on(s, base, scale, lift, S: gl.constexpr, dtype: gl.constexpr):
    """The same of scores without a mask, in rows that have seen a key; the base seldom grows."""
    ROWS: gl.constexpr = base.type.layout
    if not (S.has_softcap or S.has_alibi):
        s = s * _spread(scale, S)
    x = s - per_column(_less(base, lift, S))
    p = gl.exp2(x)
    packed, sums = _packed(p, dtype), _sum_of_thread(p)
    even, odd = gl.split(x)
    PAIRS: gl.constexpr = packed.shape[1] * 2
    COLUMNS: gl.constexpr = gl.SliceLayout(1, packed.type.layout)
    packed, sums, growth = gl.inline_asm_elementwise(
        _restart_ptx(PAIRS, dtype, S.has_codes), _operands("rff", "rfff", PAIRS),
        [packed, gl.convert_layout(sums, COLUMNS)[:, None, :], even, odd],
        dtype=(gl.int32, gl.float32, gl.float32), is_pure=True, pack=PAIRS,
    )  # fmt: skip
    growth = _first(growth, ROWS)
    return packed, _lowered(_first(sums, ROWS), lift, S), base + growth, growth


@gluon.jit
def _spread(scale, S: gl.constexpr):
    return per_column(scale) if S.has_codes else scale


@gluon.jit
def _less(base, lift, S: gl.constexpr):
    """What is subtracted from scores: weights of codes are in units of the values' inverse."""
    return base - lift if S.has_codes else base


@gluon.jit
def _lowered(sums, lift, S: gl.constexpr):
    """Of weights in these units: sums of weights."""
    if S.has_codes:
        # No product that the assembler could make one of with an addition to come.
        sums = gl.fma(sums, gl.exp2(-lift), gl.zeros_like(sums))
    return sums


@gluon.jit
def scaled_down(acc, growth):
    """What was accumulated before the base grew."""
    COUNT: gl.constexpr = acc.shape[1] // 2
    x = of_threads(acc)
    growth = gl.convert_layout(growth, row_layout(x.type.layout))
    x = gl.inline_asm_elementwise(
        _scale_ptx(COUNT), _operands("f", "ff", COUNT), [x, per_column(growth)],
        dtype=gl.float32, is_pure=True, pack=COUNT,
    )  # fmt: skip
    return gl.convert_layout(gl.reshape(x, acc.shape), acc.type.layout)


@gluon.jit
def as_operand(packed, dtype: gl.constexpr, OUT: gl.constexpr):
    """Weights as the left operand of a product whose result has layout OUT."""
    low = gl.inline_asm_elementwise(_LOW, "=h,r", [packed], dtype=gl.int16, is_pure=True, pack=1)
    high = gl.inline_asm_elementwise(_HIGH, "=h,r", [packed], dtype=gl.int16, is_pure=True, pack=1)
    p = gl.join(low, high).to(dtype, bitcast=True)
    p = gl.reshape(p, [BLOCK_ROWS, 8 * packed.shape[1]])
    return gl.convert_layout(p, gl.DotOperandLayout(0, OUT, k_width=2))


@gluon.jit
def per_row(x, layout: gl.constexpr):
    """[rows] as [rows, 4]."""
    x = gl.convert_layout(x, gl.SliceLayout(1, layout))
    return x[:, None] + gl.zeros([BLOCK_ROWS, 4], gl.float32, layout)


@gluon.jit
def per_column(x):
    """[rows, 4] to go with [rows, columns / 8, 4, 2]."""
    return gl.expand_dims(x[:, None, :], 3)


@gluon.jit
def _sum_of_thread(p):
    return gl.sum(gl.sum(p, 3), 1)


@gluon.jit
def _first(x, layout: gl.constexpr):
    """[rows, 4] of [rows, columns / 8, 4], of which inline PTX wrote only the first columns."""
    for _ in gl.static_range(_halvings(x.shape[1])):
        halves = gl.reshape(x, [BLOCK_ROWS, x.shape[1] // 2, 2, 4])
        x, _ = gl.split(gl.permute(halves, (0, 1, 3, 2)))
    return gl.convert_layout(gl.reshape(x, [BLOCK_ROWS, 4]), layout)


@gluon.constexpr_function
def _halvings(n):
    return n.bit_length() - 1


@gluon.jit
def _packed(p, dtype: gl.constexpr):
    """Weights rounded to halves, two neighbours in each int32. As halves they would be swapped and
    swapped back on their way around the loop, and in fp32 take twice the registers."""
    even, odd = gl.split(p)
    return gl.inline_asm_elementwise(
        _round_ptx(dtype), "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1
    )


# PTX of one thread, which has parts of two rows: its packed weights are one of each in turns, its
# accumulators two and two.


@gluon.constexpr_function
def _round(dtype):
    """Two fp32 to halves."""
    return "cvt.rn.bf16x2.f32" if str(dtype) == "bf16" else "cvt.rn.f16x2.f32"


@gluon.constexpr_function
def _round_ptx(dtype):
    return f"{_round(dtype)} $0, $2, $1;"


@gluon.constexpr_function
def _operands(outputs, inputs, count):
    """Constraints of `count` registers for each letter."""
    letters = [f"={c}" for c in outputs] + [*inputs]
    return ",".join(c for c in letters for _ in range(count))


@gluon.constexpr_function
def _names(kinds, count):
    """Names of the operands, `count` for each of `kinds`."""
    return [[f"${kind * count + i}" for i in range(count)] for kind in range(kinds)]


@gluon.constexpr_function
def _restart_ptx(count, dtype, has_codes):
    """Outputs: weights, sums, growth. Inputs: weights, sums; scores less the base, even and odd."""
    out, sums, growth, packed, sums_before, even, odd = _names(7, count)
    limit = LIMIT_OF_CODES.value if has_codes else LIMIT.value
    lines = [
        "{ .reg .f32 s<2>, t<2>, a, b; .reg .pred p;",
        *(f"mov.b32 {o}, {i};" for o, i in zip(out, packed, strict=True)),
        *(f"mov.f32 s{i}, {sums_before[i]}; mov.f32 t{i}, 0f00000000;" for i in range(2)),
        f"setp.gt.f32 p, s0, {limit}; setp.gt.or.f32 p, s1, {limit}, p;",
        "vote.sync.any.pred p, p, -1;",
        "@!p bra DONE;",
    ]
    for i in range(count):
        t = f"t{i % 2}"
        lines.append(f"max.f32 {t}, {t}, {even[i]}; max.f32 {t}, {t}, {odd[i]};")
    for t in ("t0", "t1"):
        for lane in (1, 2):
            lines.append(f"shfl.sync.bfly.b32 a, {t}, {lane}, 31, -1; max.f32 {t}, {t}, a;")
    if has_codes:
        # A row's weights shall add up to 2^HEADROOM: many of them are no large weight. With an
        # infinite sum the maximum tells what they add up to at most.
        for s, t in (("s0", "t0"), ("s1", "t1")):
            for lane in (1, 2):
                lines.append(f"shfl.sync.bfly.b32 a, {s}, {lane}, 31, -1; add.f32 {s}, {s}, a;")
            lines.append(f"lg2.approx.ftz.f32 a, {s}; add.f32 {t}, {t}, {math.log2(4 * count)};")
            lines.append(f"min.f32 {t}, {t}, a; sub.f32 {t}, {t}, {float(HEADROOM.value)};")
            lines.append(f"max.f32 {t}, {t}, 0f00000000;")
    lines.append("mov.f32 s0, 0f00000000; mov.f32 s1, s0;")
    for i in range(count):
        s, t = f"s{i % 2}", f"t{i % 2}"
        for x, of in (("a", even), ("b", odd)):
            lines.append(f"sub.f32 {x}, {of[i]}, {t}; ex2.approx.ftz.f32 {x}, {x};")
            lines.append(f"add.f32 {s}, {s}, {x};")
        lines.append(f"{_round(dtype)} {out[i]}, b, a;")
    lines.append("DONE:")
    for i in range(2):
        lines.append(f"mov.f32 {sums[i]}, s{i}; mov.f32 {growth[i]}, t{i};")
    return " ".join([*lines, "}"])


@gluon.constexpr_function
def _scale_ptx(count):
    """Output: accumulators. Inputs: these, and the growth of the base of each."""
    out, acc, growth = _names(3, count)
    lines = [
        "{ .reg .pred p; .reg .f32 a0, a1;",
        *(f"mov.f32 {o}, {i};" for o, i in zip(out, acc, strict=True)),
        f"setp.gt.f32 p, {growth[0]}, 0f00000000; setp.gt.or.f32 p, {growth[2]}, 0f00000000, p;",
        "vote.sync.any.pred p, p, -1;",
        "@!p bra DONE;",
        f"neg.f32 a0, {growth[0]}; ex2.approx.ftz.f32 a0, a0;",
        f"neg.f32 a1, {growth[2]}; ex2.approx.ftz.f32 a1, a1;",
        *(f"mul.f32 {o}, {o}, a{i // 2 % 2};" for i, o in enumerate(out)),
        "DONE: }",
    ]
    return " ".join(lines)
