"""The step's sampling tensors, seeds and min_tokens; the draws are tests/ops/test_sample.py's."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from echokernels.runtime.block_manager import BlockManager
from echokernels.runtime.config import EngineConfig
from echokernels.runtime.sampler import derive_seed, pack_sampling, sample_tokens
from echokernels.runtime.sampling_params import SamplingParams
from echokernels.runtime.scheduler import ScheduledBatch, ScheduledSequence, Scheduler
from echokernels.runtime.sequence import Sequence

CPU = torch.device("cpu")
VOCAB = 50


def entry(
    start: int,
    num_tokens: int,
    params: SamplingParams,
    *,
    samples: bool = True,
    num_prompt_tokens: int | None = None,
) -> ScheduledSequence:
    """Computes `num_tokens` from `start` on, the sequence's last; of the prompt unless told."""
    prompt = [1] * (start + num_tokens if num_prompt_tokens is None else num_prompt_tokens)
    seq = Sequence("request", prompt, params)
    seq.token_ids += [1] * (start + num_tokens - len(prompt))
    return ScheduledSequence(seq, start, num_tokens, samples)


def params(**fields: object) -> SamplingParams:
    return SamplingParams(**{"seed": 0, **fields})  # type: ignore[arg-type]


def pack(*entries: ScheduledSequence, eos: tuple[int, ...] = (), device: torch.device = CPU):
    return pack_sampling(ScheduledBatch(list(entries)), eos, VOCAB, device)


def draw(*entries: ScheduledSequence, logits: torch.Tensor, device: torch.device) -> list[int]:
    tokens = sample_tokens(logits.clone(), pack(*entries, device=device))
    assert tokens.dtype == torch.int64
    return tokens.tolist()


def test_rows_are_the_entries_that_sample(device: torch.device) -> None:
    inputs = pack(
        entry(6, 1, params(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, seed=3)),
        entry(0, 4, params(), samples=False),
        entry(2, 9, params(temperature=0, seed=None)),
        device=device,
    )
    assert inputs.temperature.tolist() == [0.5, 0.0]
    assert inputs.top_k.tolist() == [7, 0]
    assert inputs.top_p.tolist() == [0.25, 1.0]
    assert inputs.min_p.tolist() == [0.125, 0.0]
    assert inputs.seeds.tolist() == [3, 0]
    # Where the sampled token goes: one past the last that is computed.
    assert inputs.positions.tolist() == [7, 11]
    assert inputs.banned is None
    assert inputs.seeds.device.type == device.type


def test_values_that_do_not_fit_the_tensors() -> None:
    inputs = pack(
        entry(0, 1, params(seed=2**64 - 1, top_k=10**12, temperature=1e300)),
        entry(0, 1, params(seed=-(2**63), temperature=1e-300)),
        entry(0, 1, params(seed=2**63 - 1)),
    )
    assert inputs.seeds.tolist() == [-1, -(2**63), 2**63 - 1]
    assert inputs.top_k.tolist() == [VOCAB, 0, 0]
    assert inputs.temperature[0] == pytest.approx(1e38)
    assert inputs.temperature[1] == 0


def test_no_entry_samples(device: torch.device) -> None:
    inputs = pack(entry(0, 3, params(), samples=False), device=device)
    assert sample_tokens(torch.empty(0, VOCAB, device=device), inputs).shape == (0,)


def test_an_unseeded_request_must_have_been_given_a_seed() -> None:
    with pytest.raises(AssertionError, match="the engine seeds every request"):
        pack(entry(0, 1, params(seed=None)))


def test_derived_seeds_differ_and_stay() -> None:
    derived = [derive_seed(engine, index) for engine in range(-5, 5) for index in range(1000)]
    assert len(set(derived)) == len(derived)
    assert all(0 <= seed < 2**64 for seed in derived)
    # SplitMix64 from state 0 begins with 0xE220A8397B1DCDAF; these are mixed once more.
    assert derive_seed(0, 0) == 0xA706DD2F4D197E6F
    assert derive_seed(2**64 - 1, 7) == derive_seed(-1, 7)


def test_derived_seeds_have_no_visible_pattern() -> None:
    # Over many requests each bit is set half of the time (1,000 draws: 500 +- 16).
    derived = [derive_seed(1, index) for index in range(1000)]
    for bit in range(64):
        assert 420 < sum(seed >> bit & 1 for seed in derived) < 580


def test_a34_a_seeded_row_is_the_same_beside_an_unseeded_one(device: torch.device) -> None:
    logits = torch.zeros(2, VOCAB, device=device)
    seeded = params(temperature=0.8, seed=42)
    [alone] = draw(entry(3, 1, seeded), logits=logits[:1], device=device)
    others = set()
    for index in range(4):
        free = dataclasses.replace(seeded, seed=derive_seed(0, index))
        both = draw(entry(3, 1, seeded), entry(3, 1, free), logits=logits, device=device)
        swapped = draw(entry(3, 1, free), entry(3, 1, seeded), logits=logits, device=device)
        assert both == swapped[::-1]
        assert both[0] == alone
        others.add(both[1])
    assert len(others) > 1


def test_recomputing_after_a_preemption_draws_the_same(device: torch.device) -> None:
    logits = torch.zeros(1, VOCAB, device=device)
    decode = entry(9, 1, params(seed=5), num_prompt_tokens=4)
    recompute = entry(0, 10, params(seed=5), num_prompt_tokens=4)
    later = entry(10, 1, params(seed=5), num_prompt_tokens=4)
    drawn = [draw(e, logits=logits, device=device) for e in (decode, recompute, later)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_tokens_in_flight_count_as_outputs() -> None:
    # The second step is scheduled before the first one's token is known.
    scheduler = Scheduler(EngineConfig(page_size=4, num_pages=8), BlockManager(8, 4))
    scheduler.add(Sequence("request", [1, 2, 3], params(min_tokens=1, stop_token_ids=(9,))))
    first, second = (pack_sampling(scheduler.schedule(), (), VOCAB, CPU) for _ in range(2))
    assert first.positions.tolist() == [3]
    assert second.positions.tolist() == [4]
    assert first.banned is not None
    assert second.banned is None


def banned(*entries: ScheduledSequence, eos: tuple[int, ...]) -> list[list[int]]:
    """Per row, the ids that cannot be drawn."""
    logits = torch.zeros(len(entries), VOCAB)
    sample_tokens(logits, pack(*entries, eos=eos))
    return [row.isneginf().nonzero()[:, 0].tolist() for row in logits]


def test_min_tokens_bans_every_eos_and_stop_id_until_there_are_as_many_outputs() -> None:
    # Llama 3 has several EOS ids; banning the first alone was a bug elsewhere (vllm#15407).
    stop = params(min_tokens=3, stop_token_ids=[20, 7])
    rows = banned(
        entry(0, 4, stop),
        entry(5, 1, stop, num_prompt_tokens=4),  # two outputs
        entry(6, 1, stop, num_prompt_tokens=4),  # three
        entry(0, 4, params(min_tokens=1, stop_token_ids=[20], ignore_eos=True)),
        entry(0, 4, params(stop_token_ids=[20])),
        eos=(2, 5, 7),
    )
    assert rows == [[2, 5, 7, 20], [2, 5, 7, 20], [], [20], []]


def test_min_tokens_ignores_stop_ids_outside_the_vocabulary() -> None:
    [row] = banned(entry(0, 1, params(min_tokens=1, stop_token_ids=[VOCAB, 10**9, 3])), eos=())
    assert row == [3]
    [row] = banned(entry(0, 1, params(min_tokens=1, stop_token_ids=[VOCAB])), eos=())
    assert row == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_banned_argmax_gives_way_to_the_next(device: torch.device, dtype: torch.dtype) -> None:
    logits = torch.zeros(2, VOCAB, dtype=dtype, device=device)
    logits[:, 3], logits[:, 8] = 5.0, 4.0
    entries = [entry(0, 1, params(temperature=0, min_tokens=n)) for n in (1, 0)]
    tokens = sample_tokens(logits, pack(*entries, eos=(3,), device=device))
    assert tokens.tolist() == [8, 3]
