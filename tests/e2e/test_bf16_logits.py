"""bf16 logits on a GPU are as close to the exact ones as those of transformers' own bf16 model.

The oracle is the same model, with the same bf16 weights, in float64. Errors are relative to its
logits' RMS; what is compared is the RMS of the errors over all tokens and the vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from echokernels.runtime.batch import pack_batch
from echokernels.runtime.cache_memory import allocate_caches
from echokernels.runtime.loader import load_model
from echokernels.runtime.sampling_params import SamplingParams
from echokernels.runtime.scheduler import ScheduledBatch, ScheduledSequence
from echokernels.runtime.sequence import Sequence
from tests.tiny_llama import save, tiny_llama

# Deep and wide enough that roundings add up as in a real model, small enough for float64.
SHAPE = {
    "num_hidden_layers": 8,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
}
NUM_TOKENS = 200
# The two errors are samples of the same size of rounding noise.
SLACK = 1.05


def relative_error(logits: torch.Tensor, exact: torch.Tensor) -> float:
    error = logits.double().cpu() - exact
    return float(error.square().mean().sqrt() / exact.square().mean().sqrt())


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [NUM_TOKENS, 64, 1], ids=["prefill", "chunks", "decode"])
def test_bf16_logits_are_within_sdpa_error(tmp_path: Path, cuda: torch.device, chunk: int) -> None:
    # Real models are initialised with 0.02; far larger weights would saturate the softmax.
    save(tiny_llama(std=0.05, **SHAPE).to(torch.bfloat16), tmp_path, tokenizer=False)
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(SHAPE["vocab_size"], (NUM_TOKENS,), generator=generator).tolist()
    exact = their_logits(tmp_path, torch.device("cpu"), token_ids, torch.float64)
    theirs = their_logits(tmp_path, cuda, token_ids, torch.bfloat16)
    ours = our_logits(tmp_path, cuda, token_ids, chunk)
    assert relative_error(ours, exact) <= SLACK * relative_error(theirs, exact)


def their_logits(
    folder: Path, device: torch.device, token_ids: list[int], dtype: torch.dtype
) -> torch.Tensor:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    return model.to(device)(torch.tensor([token_ids], device=device)).logits[0]


def our_logits(
    folder: Path, device: torch.device, token_ids: list[int], chunk: int
) -> torch.Tensor:
    """Logits of all tokens, computed `chunk` at a time over pages of 16."""
    model, config, place = load_model(folder, "bfloat16", device)
    page_size = 16
    num_pages = -(-len(token_ids) // page_size)
    caches = allocate_caches(config, num_pages, page_size, place)
    seq = Sequence("request", token_ids, SamplingParams())
    seq.block_table = list(range(num_pages))[::-1]
    logits = []
    for start in range(0, len(token_ids), chunk):
        count = min(chunk, len(token_ids) - start)
        batch = ScheduledBatch([ScheduledSequence(seq, start, count, samples=True)])
        inputs = pack_batch(batch, page_size, device)
        hidden = model(inputs.input_ids, inputs.positions, caches, inputs.attention)
        logits.append(model.compute_logits(hidden))
    return torch.cat(logits)
