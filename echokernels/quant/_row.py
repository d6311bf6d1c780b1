"""Dynamic symmetric quantisation of a row, for kernels that have it in fp32: one scale for it all.

    scale = max(max|y| / limit, 1e-12)        limit = 127 (int8), 448 (float8_e4m3fn)
    code  = y / scale                         rounded half to even

so that y is about code * scale and no code lies beyond the limit. A row that holds NaN or infinity
has scale NaN and codes 0: all of it comes back as NaN, and no other row notices. A row of zeros has
codes 0 and the scale 1e-12.
"""

import torch
import triton
import triton.language as tl

from echokernels._checks import check_dtype, check_last_contiguous, check_shape
from echokernels._target import INTERPRETED, target_of

LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
MIN_SCALE = 1e-12

LEAST_SCALE = tl.constexpr(MIN_SCALE)
_INT8_LIMIT = tl.constexpr(LIMITS[torch.int8])
_FP8_LIMIT = tl.constexpr(LIMITS[torch.float8_e4m3fn])
_ROUND_FIRST = tl.constexpr(INTERPRETED)


@triton.jit
def magnitude(y):
    """|y| of fp32 `y` as int32, in the same order, with NaN the largest: `tl.max` of floats would
    lose it."""
    return y.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def largest(bits, AXIS: tl.constexpr = -1):
    """The largest in each row of the magnitudes `bits`, fp32 again. Rows lie along AXIS."""
    return tl.max(bits, axis=AXIS).to(tl.float32, bitcast=True)


@triton.jit
def row_scale_of(absmax, DTYPE: tl.constexpr):
    """The scale of rows whose codes are DTYPE."""
    return row_scale(absmax, _INT8_LIMIT if DTYPE.is_int() else _FP8_LIMIT)


@triton.jit
def row_scale(absmax, LIMIT: tl.constexpr):
    scale = tl.maximum(tl.div_rn(absmax, LIMIT), LEAST_SCALE)
    # False for NaN too.
    return tl.where(absmax < float("inf"), scale, float("nan"))


@triton.jit
def encode(y, scale, DTYPE: tl.constexpr):
    """The codes of fp32 `y`, as DTYPE."""
    code = tl.where(scale == scale, _divide(y, scale), 0.0)
    if DTYPE.is_int():
        # Adding 1.5 * 2^23 leaves no bits for a fraction: the sum is rounded half to even and its
        # low byte is the integer in two's complement.
        code = (code + 12582912.0).to(tl.int32, bitcast=True)
    elif _ROUND_FIRST:
        code = _round_to_e4m3(code)
    return code.to(DTYPE)


@triton.jit
def _divide(y, scale):
    """y / scale, correctly rounded as `tl.div_rn` is, but with one division for all of a row
    (Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990).
    """
    inverse = tl.div_rn(1.0, scale)
    quotient = y * inverse
    return tl.fma(tl.fma(-quotient, scale, y), inverse, quotient)


@triton.jit
def _round_to_e4m3(x):
    """fp32 `x` rounded half to even to a value of float8_e4m3fn, which the interpreter's own cast
    truncates."""
    # The same sum with 1.5 * 2^23 quanta: a quantum is 2^-3 of x's power of two, which counts as
    # at least 2^-6 (subnormals).
    power = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, (127 - 6) << 23)
    shift = ((power + ((23 - 3) << 23)) | (1 << 22)).to(tl.float32, bitcast=True)
    return (x + shift) - shift


def check_codes(out: torch.Tensor, scale: torch.Tensor, *shape: int) -> None:
    """`out` holds codes of `shape`, `scale` a scale for each of its rows."""
    check_shape("out", out, *shape)
    check_dtype("out", out, tuple(LIMITS))
    check_last_contiguous("out", out)
    check_shape("scale", scale, *shape[:-1])
    check_dtype("scale", scale, (torch.float32,))


def check_has_casts(name: str, codes: torch.Tensor) -> None:
    """Raises ValueError when the GPU that `codes` are on has no casts to and from their dtype."""
    if codes.dtype == torch.float8_e4m3fn and not (target := target_of(codes.device)).casts_to_fp8:
        raise ValueError(
            f"{name}.dtype is float8_e4m3fn, must be int8 on {target.name}: "
            "FP8 needs compute capability 8.9 or later"
        )
