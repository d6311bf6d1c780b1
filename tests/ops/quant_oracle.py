"""What a quantised row must be, from the exact row in float64."""

import torch

from echokernels._target import INTERPRETED
from tests.strategies import poisoned, randn
from tests.tolerances import tolerance

LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
CODE_DTYPES = tuple(LIMITS)
# The interpreter's fma rounds the product too, which may cost the quotient its last bit.
_ULP = 2.0**-23 if INTERPRETED else 0.0


def strided_codes(
    *shape: int, dtype: torch.dtype, device: torch.device, pad: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs (codes, scales) of `shape` to write, inside larger ones that hold sentinels."""
    wide = poisoned(*shape[:-1], shape[-1] + pad, dtype=torch.int8, device=device).view(dtype)
    scales = poisoned(*shape[:-1], 1 + pad, dtype=torch.float32, device=device)
    return wide[..., : shape[-1]], scales[..., 0]


def assert_gap_is_untouched(codes: torch.Tensor, pad: int) -> None:
    """Nothing was written behind the rows of what `strided_codes` made."""
    if pad and codes.numel():
        wide = codes.view(torch.int8).as_strided((*codes.shape[:-1], codes.shape[-1] + pad),
                                                 codes.stride())  # fmt: skip
        gap = wide[..., codes.shape[-1] :]
        assert torch.equal(gap, poisoned(*gap.shape, dtype=torch.int8, device=gap.device))


def assert_codes(codes: torch.Tensor, scale: torch.Tensor, y: torch.Tensor) -> None:
    """`codes` and `scale` are those of `y`, float64, which the op knows to fp32 arithmetic: codes
    may differ only where that reaches the border between two."""
    assert codes.shape == y.shape
    assert scale.shape == y.shape[:-1]
    if y.numel() == 0:
        return
    y = y.cpu()
    slack = tolerance(torch.float32)
    want_scale = (y.abs().amax(-1) / LIMITS[codes.dtype]).clamp_min(1e-12)
    error = (scale.cpu().double() / want_scale - 1).abs().max()
    assert error <= slack, f"scale is off by {error:.3e} of its value"
    exact = y / want_scale[..., None]
    # Absolute slack of an element: errors of a product are relative to it, those of a sum that
    # cancels to the terms, which are of the order of the row's RMS.
    slack = 2 * slack * (exact.abs() + exact.square().mean(-1, keepdim=True).sqrt())
    have = codes.cpu().double()
    low, high = (round_to(exact + by, codes.dtype) for by in (-slack, slack))
    wrong = (have < low) | (have > high)
    assert not wrong.any(), (
        f"{int(wrong.sum())} codes are off: {have[wrong][:4]} for {exact[wrong][:4]}"
    )


def round_to(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float64 `values` rounded half to even to those of `dtype`, saturating."""
    limit = LIMITS[dtype]
    values = values.clamp(-limit, limit)
    if dtype == torch.int8:
        return values.round()
    # e4m3: three bits below the leading one, whose place is at least 2^-6.
    exponent = values.abs().clamp_min(2.0**-6).log2().floor()
    quantum = torch.exp2(exponent - 3)
    return (values / quantum).round() * quantum


def assert_exact_codes(codes: torch.Tensor, scale: torch.Tensor, x: torch.Tensor) -> None:
    """`codes` and `scale` are those of `x`, rows that the op knows to the bit.

    Scale and quotient are fp32, each rounded once: float64 is wide enough not to round them twice.
    """
    assert codes.shape == x.shape
    x = x.cpu().double()
    absmax = x.abs().amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])
    want_scale = (absmax / LIMITS[codes.dtype]).clamp_min(1e-12).float().double()
    finite = absmax.isfinite()
    assert_same_values(scale, want_scale.where(finite, torch.nan))
    quotient = (x / want_scale[..., None]).float().double().where(finite[..., None], 0.0)
    low, high = (round_to(quotient * by, codes.dtype) for by in (1 - _ULP, 1 + _ULP))
    have = codes.cpu().double()
    wrong = (have < low.minimum(high)) | (have > low.maximum(high))
    assert not wrong.any(), f"{int(wrong.sum())} codes are off: {have[wrong][:4]}"


def assert_same_values(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal numbers in whatever dtypes, and NaN in the same places."""
    assert torch.equal(*(t.cpu().double().nan_to_num(nan=7e77) for t in (actual, expected)))


def uneven_rows(
    *shape: int, dtype: torch.dtype, device: torch.device, gen: torch.Generator
) -> torch.Tensor:
    """Rows of all kinds, drawn one by one: normal, zero, one value, subnormal, up to the largest of
    the dtype, with NaN, with infinity, with an outlier."""
    rows = randn(*shape, dtype=torch.float64, device=torch.device("cpu"), gen=gen)
    if rows.numel() == 0:
        return rows.to(dtype).to(device)
    info = torch.finfo(dtype)
    kind = torch.randint(9, shape[:-1], generator=gen)
    rows[kind == 1] = 0.0
    rows[kind == 2] = 5.0
    rows[kind == 3] *= info.smallest_normal / 16
    rows[kind == 4] *= info.max / rows[kind == 4].abs().amax(-1, keepdim=True)
    column = torch.randint(shape[-1], shape[:-1], generator=gen)[..., None]
    for number, value in ((5, torch.nan), (6, torch.inf), (7, -torch.inf), (8, 1000.0)):
        spoilt = rows.scatter(-1, column, value)
        rows = torch.where((kind == number)[..., None], spoilt, rows)
    return rows.clamp(-info.max, info.max).where(rows.isfinite(), rows).to(dtype).to(device)
