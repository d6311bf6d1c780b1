"""The shortest sign of life, in under 10 s: import, one op of each family, a few steps."""

import json

import torch

import echokernels
from echokernels.runtime import LLM, SamplingParams

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def test_one_op_of_each_family():
    x = torch.randn(3, 64)
    assert echokernels.rms_norm(x, torch.ones(64)).shape == x.shape
    assert echokernels.silu_and_mul(x).shape == (3, 32)
    q, cache = torch.randn(2, 4, 16), torch.randn(4, 8, 2, 16)
    table, lens = torch.tensor([[0, 1], [2, 3]]), torch.tensor([9, 3])
    assert echokernels.paged_attention(q, cache, cache, table, lens).isfinite().all()
    greedy, none = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    tokens = echokernels.sample(torch.eye(2), greedy, None, None, None, none, none)
    assert tokens.tolist() == [0, 1]


def test_an_engine_makes_tokens(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    llm = LLM(tmp_path, load_format="dummy", device="cpu", max_num_seqs=4)
    [output] = llm.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(output.token_ids) == 4
    llm.engine.check()
