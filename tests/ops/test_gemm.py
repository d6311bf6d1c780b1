"""Tiles of the projections with fused epilogues: pure functions, no GPU."""

from itertools import product

import pytest

from echokernels._gemm import split_tokens, token_block, weight_rows, weight_tile
from echokernels._target import KNOWN_TARGETS

ROWS = [16, 960, 1280, 6144, 28_672, 114_688]
H200 = KNOWN_TARGETS["sm_90"]


def tile_of(rows, tokens, itemsize, target):
    block_t = token_block(tokens, itemsize)
    block_m = weight_rows(rows, block_t, itemsize, target)
    block_t = split_tokens(block_t, tokens, -(-rows // block_m), target)
    return block_t, weight_tile(block_m, block_t, -(-rows // block_m), itemsize, target)


@pytest.mark.parametrize("target", KNOWN_TARGETS.values(), ids=KNOWN_TARGETS)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_fit_every_target(target, itemsize):
    for rows, tokens in product(ROWS, [1, 16, 17, 64, 65, 5000]):
        block_t, tile = tile_of(rows, tokens, itemsize, target)
        stage_bytes = (tile.block_m + block_t) * tile.block_n * itemsize
        assert tile.num_stages >= 1
        assert tile.num_stages * stage_bytes <= target.shared_memory
        assert tile.block_m >= 16


def test_tokens_share_a_tile():
    assert [token_block(n, 2) for n in (0, 1, 16, 17, 64, 65, 5000)] == [
        16, 16, 16, 32, 64, 128, 128,
    ]  # fmt: skip
    assert token_block(5000, 4) == 32


@pytest.mark.parametrize(
    ("rows", "tokens", "block_m"),
    # QKV of 70B by 8 GPUs and of Llama-3-8B, FFN of Llama-3-8B.
    [
        (1280, 16, 16),
        (1280, 17, 64),
        (6144, 1, 64),
        (6144, 64, 64),
        (28_672, 16, 64),
        (28_672, 64, 128),
    ],
)
def test_rows_of_a_tile(rows, tokens, block_m):
    assert weight_rows(rows, token_block(tokens, 2), 2, H200) == block_m


def test_programs_that_fit_run_at_once():
    for rows in (6144, 24_576, 28_672):  # 1, 3 and 4 programs an SM
        block_t, tile = tile_of(rows, 16, 2, H200)
        residents = -(-(rows // tile.block_m) // H200.num_sms)
        stage_bytes = (tile.block_m + block_t) * tile.block_n * 2
        assert residents * (tile.num_stages * stage_bytes + 1024) <= 228 * 1024


@pytest.mark.parametrize(
    ("row_tiles", "tokens", "block_t"),
    [(33, 64, 16), (34, 64, 32), (66, 64, 32), (67, 64, 64), (20, 128, 32), (1, 129, 128)],
)
def test_tokens_are_split_while_every_program_has_an_sm(row_tiles, tokens, block_t):
    assert split_tokens(token_block(tokens, 2), tokens, row_tiles, H200) == block_t
