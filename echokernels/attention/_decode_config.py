"""Tiles and programs of the portable decode."""

import torch
import triton

from echokernels._target import Target
from echokernels._tuning import TileConfig, select
from echokernels.attention._sharing import Kind, Sharing, sharing_of
from echokernels.attention.split import MAX_QUERIES, MOST_SHARES_PER_SM

_MOST_PROGRAMS_PER_SM = 4


def _config(
    head_dim: int, itemsize: int, rows: int, target: Target, has_codes: bool = False
) -> TileConfig:
    """block_m rows by block_n keys. A sequence has up to `rows` of (query token, group's head)."""
    wide = head_dim > 128
    if itemsize == 4:
        # Exact fp32 products run on the ordinary cores and keep both operands in registers.
        return TileConfig(16, 16 if wide else 32, num_warps=4, num_stages=1)
    # 16 is the tensor cores' least; several queries of a large group take several tiles.
    block_m = min(max(16, triton.next_power_of_2(rows)), 32 if wide else 64)
    block_n = 32 if wide else 64
    # On an H200 two warps a program read 64 x 8k at 4.43 TB/s, four at 4.24, eight at 3.30: fewer
    # warps mean more programs, and so more independent loads, on an SM.
    # Codes are converted in registers, of which two warps have too few.
    num_warps = 2 if block_m == 16 and not wide and not has_codes else 4
    if block_m == 64 and head_dim > 64 and target.arch != 90:
        # Without WGMMA the operands pass through registers.
        num_warps = 8
    # A third stage gains nothing there, and costs a program on each SM.
    num_stages = (3 if target.shared_memory >= 128 * 1024 else 1) if wide else 2
    return TileConfig(block_m, block_n, num_warps, num_stages)


def decode_config(
    head_dim: int,
    dtype: torch.dtype,
    group: int,
    max_seqlen_q: int,
    is_invariant: bool,
    target: Target,
    has_codes: bool = False,
) -> tuple[TileConfig, int]:
    """(tile of the portable kernel, tiles of rows that a sequence has at most). is_invariant: the
    tile must not follow the longest query of the batch."""
    rows = (MAX_QUERIES if is_invariant else max_seqlen_q) * group
    key = (head_dim, dtype.itemsize, min(triton.next_power_of_2(rows), 64), target.name, has_codes)
    config = select(
        "paged_attention",
        key,
        lambda: _config(head_dim, dtype.itemsize, rows, target, has_codes),
    )
    return config, triton.cdiv(max_seqlen_q * group, config.block_m)


def sharing(
    device: torch.device,
    target: Target,
    config: TileConfig,
    head_dim: int,
    dtype: torch.dtype,
    group: int,
    units: int,
) -> Sharing:
    """Of the portable kernel, whose tiles are `config`. units: sequences times KV heads."""
    allowed = portable_sharings(config, head_dim, dtype, target)
    kind = Kind("portable", head_dim, dtype, group, units > target.num_sms)
    return sharing_of(device, kind, allowed[0], allowed)


def portable_sharings(
    config: TileConfig, head_dim: int, dtype: torch.dtype, target: Target
) -> tuple[Sharing, ...]:
    """What may be calibrated, the default first: as many programs as an SM holds at once, each with
    a tile of K and of V and the queries, up to the four that were best on an H200."""
    row_bytes = max(16, triton.next_power_of_2(head_dim)) * dtype.itemsize
    tile_bytes = (2 * config.block_n + config.block_m) * row_bytes
    default = min(max(target.shared_memory // tile_bytes, 1), _MOST_PROGRAMS_PER_SM)
    others = (n for n in range(1, MOST_SHARES_PER_SM + 1) if n != default)
    return tuple(Sharing(config.block_n, n) for n in (default, *others))
