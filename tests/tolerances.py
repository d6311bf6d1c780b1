"""Tolerances from unit roundoff, in one place.

An op computes in fp32 and rounds once, so its error against the exact result of the same rounded
inputs is half an ulp of the output dtype plus what fp32 accumulation adds. `scale` of an element is
what its error is measured against: its own magnitude plus a floor from the tensor's RMS, since a
sum of large terms may cancel to a small value.
"""

import torch

from echokernels._target import INTERPRETED

UNIT_ROUNDOFF = {
    torch.float16: 2.0**-11,
    # Triton's interpreter truncates where the hardware rounds to nearest.
    torch.bfloat16: 2.0**-7 if INTERPRETED else 2.0**-8,
    torch.float32: 2.0**-24,
    torch.float64: 2.0**-53,
}
# fp32 arithmetic inside (sums of hundreds of terms, exp, rsqrt to 2 ulp) costs a few tens of its
# roundoffs.
_INSIDE = 64 * UNIT_ROUNDOFF[torch.float32]


def tolerance(dtype: torch.dtype, roundings: float = 1.0) -> float:
    """Relative error allowed after `roundings` roundings to `dtype`, with fp32 arithmetic between
    them."""
    return roundings * UNIT_ROUNDOFF[dtype] + _INSIDE


def assert_close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    roundings: float = 1.0,
    scale: torch.Tensor | float | None = None,
) -> None:
    """`actual`, in its own dtype, equals `expected` (float64) within `roundings` of that dtype.

    NaN and infinities must agree exactly. `scale` replaces the RMS of `expected` as the floor of
    the magnitude that errors are relative to.
    """
    assert actual.shape == expected.shape, (
        f"shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    )
    if actual.numel() == 0:
        return
    have = actual.detach().cpu().double()
    want = expected.detach().cpu().double()
    finite = want.isfinite()
    # Finite values beyond the dtype's range round to infinity.
    overflow = finite & (want.abs() > torch.finfo(actual.dtype).max)
    special = ~finite | overflow
    assert torch.equal(
        have[special].nan_to_num(nan=7e77),
        want.to(actual.dtype).double()[special].nan_to_num(nan=7e77),
    ), "infinities or NaN differ"
    have, want = have[~special], want[~special]
    if want.numel() == 0:
        return
    if scale is None:
        scale = want.square().mean().sqrt()
    elif isinstance(scale, torch.Tensor):
        scale = scale.detach().cpu().double().expand(special.shape)[~special]
    floor = torch.finfo(actual.dtype).smallest_normal
    error = (have - want).abs() / (want.abs() + scale).clamp_min(floor)
    error = torch.where(error.isnan(), torch.inf, error)
    limit = tolerance(actual.dtype, roundings)
    worst = int(error.argmax())
    rms = error.square().mean().sqrt()
    assert error[worst] <= limit, (
        f"max error {error[worst]:.3e} (rms {rms:.3e}) exceeds {limit:.3e}: "
        f"{have[worst]} instead of {want[worst]}; "
        f"{int((error > limit).sum())} of {error.numel()} are off"
    )


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equality that also holds for NaN, and tells -0 from 0."""
    assert torch.equal(
        actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
    )
