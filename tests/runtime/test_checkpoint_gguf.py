"""GGUF files: names, row order, types, tied embeddings, rotary factors, and damaged files."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as GgmlType
from hypothesis import given, settings
from hypothesis import strategies as st

from echokernels.runtime.checkpoint import open_checkpoint
from echokernels.runtime.gguf_checkpoint import deinterleave_heads
from echokernels.runtime.gguf_file import read_gguf
from tests.runtime.model_files import (
    add_gguf_weights,
    finish_gguf,
    gguf_writer,
    random_weights,
    write_gguf,
)


def test_names_shapes_and_row_order_are_those_of_hugging_face(tmp_path: Path) -> None:
    weights = random_weights()
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", weights))
    assert set(checkpoint.names()) == set(weights)
    assert len(checkpoint) == len(weights)
    for name, tensor in checkpoint.tensors():
        assert torch.equal(tensor, weights[name]), name


# The largest error that rounding a block of 32 to the type's grid can make, from its definition:
# Q8_0 rounds to absmax / 127, Q4_1 to (max - min) / 15. Q4_0 has 16 levels of absmax / 8 around
# zero, the uppermost missing, so that a value may be a whole level away. Scales are fp16.
def worst_error(blocks: np.ndarray, ggml_type: GgmlType) -> np.ndarray:
    absmax = np.abs(blocks).max(axis=-1, keepdims=True)
    spread = blocks.max(axis=-1, keepdims=True) - blocks.min(axis=-1, keepdims=True)
    grid = {
        GgmlType.Q8_0: absmax / 127 / 2,
        GgmlType.Q4_0: absmax / 8,
        GgmlType.Q4_1: spread / 15 / 2,
    }
    return grid[ggml_type] + absmax * 2**-9


@pytest.mark.parametrize("ggml_type", [GgmlType.Q8_0, GgmlType.Q4_0, GgmlType.Q4_1])
def test_quantised_blocks_become_fp32(tmp_path: Path, ggml_type: GgmlType) -> None:
    weights = random_weights()
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", weights, ggml_type))
    assert checkpoint.config.torch_dtype == "float32"
    for name, tensor in checkpoint.tensors():
        assert tensor.dtype == torch.float32
        assert tensor.shape == weights[name].shape
        if tensor.ndim == 1:
            assert torch.equal(tensor, weights[name])
            continue
        blocks = weights[name].numpy().reshape(-1, 32)
        error = np.abs(tensor.numpy().reshape(-1, 32) - blocks)
        assert (error <= worst_error(blocks, ggml_type)).all(), name
        assert error.max() > 0  # it was quantised


@pytest.mark.parametrize(
    ("ggml_type", "dtype"), [(GgmlType.F16, torch.float16), (GgmlType.BF16, torch.bfloat16)]
)
def test_half_precision_comes_as_stored(
    tmp_path: Path, ggml_type: GgmlType, dtype: torch.dtype
) -> None:
    weights = random_weights()
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", weights, ggml_type))
    assert checkpoint.config.torch_dtype == str(dtype).removeprefix("torch.")
    for name, tensor in checkpoint.tensors():
        expected = weights[name].to(dtype) if tensor.ndim == 2 else weights[name]
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected), name


def test_every_type_that_the_package_dequantises_is_read(tmp_path: Path) -> None:
    # K-quants need rows of 256, more than the tiny model has: a lone embedding will do.
    rng = np.random.default_rng(0)
    for ggml_type in (
        GgmlType.Q5_0,
        GgmlType.Q5_1,
        GgmlType.Q2_K,
        GgmlType.Q4_K,
        GgmlType.Q6_K,
        GgmlType.IQ4_XS,
    ):
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
        raw = rng.integers(0, 64, (2, 256 // block_size * block_bytes), dtype=np.uint8)
        path = tmp_path / f"{ggml_type.name}.gguf"
        writer = gguf_writer(path)
        writer.add_tensor("token_embd.weight", raw, raw_dtype=ggml_type)
        finish_gguf(writer)
        tensor = open_checkpoint(path).tensor("model.embed_tokens.weight")
        assert torch.equal(tensor, torch.from_numpy(gguf.dequantize(raw, ggml_type)))
        assert tensor.shape == (2, 256)


def test_bias_rows_are_put_back_in_order_too(tmp_path: Path) -> None:
    weights = random_weights()
    sizes = {"q_proj": 64, "k_proj": 32, "v_proj": 32, "o_proj": 64}
    for layer in range(2):
        for part, size in sizes.items():
            weights[f"model.layers.{layer}.self_attn.{part}.bias"] = torch.randn(size)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", weights))
    assert checkpoint.config.attention_bias
    assert not checkpoint.config.mlp_bias
    for name, tensor in checkpoint.tensors():
        assert torch.equal(tensor, weights[name]), name


def test_deinterleave_of_one_head_by_hand() -> None:
    stored = torch.tensor([0, 3, 1, 4, 2, 5])  # pairs (i, i + 3), side by side
    assert deinterleave_heads(stored, 1).tolist() == [0, 1, 2, 3, 4, 5]


def test_config_is_that_of_the_metadata(tmp_path: Path) -> None:
    writer = gguf_writer(tmp_path / "m.gguf")
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(7)
    add_gguf_weights(writer, random_weights())
    finish_gguf(writer)
    config = open_checkpoint(tmp_path / "m.gguf").config
    assert (config.architecture, config.vocab_size, config.hidden_size) == ("llama", 40, 64)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (2, 4, 2)
    assert (config.head_dim, config.intermediate_size) == (16, 96)
    assert config.max_position_embeddings == 128
    # fp32 in the file, yet the decimal number that a config.json would have.
    assert (config.rms_norm_eps, config.rope_theta) == (1e-5, 50000.0)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 7))
    assert config.rope_scaling is None
    assert not config.tie_word_embeddings
    assert not config.attention_bias


def test_tied_embedding_not_lost_without_output(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", random_weights(tied=True)))
    assert checkpoint.config.tie_word_embeddings
    assert "lm_head.weight" not in checkpoint.names()


def write_with_metadata(path: Path, **values: object) -> Path:
    """A whole model whose metadata also has `values`; a `.` in a key is written as `__`."""
    writer = gguf_writer(path, arch="llama")
    for name, value in values.items():
        key = name.replace("__", ".")
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
        # A key that the writer already has would be a duplicate, which it refuses.
        writer.kv_data[0].pop(key, None)
        add[type(value)](key, value)
    add_gguf_weights(writer, random_weights())
    finish_gguf(writer)
    return path


def test_llama3_rotary_factors_become_configuration(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)  # one for each of the 16 / 2 pairs
    writer = gguf_writer(tmp_path / "m.gguf")
    writer.add_tensor("rope_freqs.weight", factors)
    add_gguf_weights(writer, random_weights())
    finish_gguf(writer)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    expected = {"rope_type": "factors", "factors": factors.tolist()}
    assert checkpoint.config.rope_scaling == expected
    assert set(checkpoint.names()) == set(random_weights())


def test_rotary_factors_of_the_wrong_length_are_refused(tmp_path: Path) -> None:
    writer = gguf_writer(tmp_path / "m.gguf")
    writer.add_tensor("rope_freqs.weight", np.ones(7, np.float32))
    add_gguf_weights(writer, random_weights())
    finish_gguf(writer)
    with pytest.raises(ValueError, match=r"rope_freqs.weight.*\(7,\).*allowed is \(8,\)"):
        open_checkpoint(tmp_path / "m.gguf")


def test_linear_rope_scaling(tmp_path: Path) -> None:
    scaling = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}
    config = open_checkpoint(write_with_metadata(tmp_path / "m.gguf", **scaling)).config
    assert config.rope_scaling == {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"general__architecture": "mamba"}, "architecture is 'mamba', must be one of llama"),
        ({"llama__rope__scaling__type": "yarn"}, "scaling.type' is 'yarn'; supported are 'none'"),
        ({"llama__rope__dimension_count": 8}, "dimension_count' is 8; it must be head_dim=16"),
        ({"llama__block_count": "two"}, "'llama.block_count' is str two; it must be int"),
        ({"llama__attention__head_count": 0}, "num_heads is 0"),
        ({"split__count": 3}, "one of 3 parts"),
    ],
)
def test_unsupported_metadata(tmp_path: Path, values: dict[str, object], message: str) -> None:
    path = write_with_metadata(tmp_path / "m.gguf", **values)
    with pytest.raises(ValueError, match=rf"m\.gguf: .*{message}"):
        open_checkpoint(path)


def test_missing_metadata_is_named(tmp_path: Path) -> None:
    writer = gguf_writer(tmp_path / "m.gguf")
    del writer.kv_data[0]["llama.block_count"]
    add_gguf_weights(writer, random_weights())
    finish_gguf(writer)
    with pytest.raises(ValueError, match=r"m\.gguf: metadata 'llama.block_count' is missing"):
        open_checkpoint(tmp_path / "m.gguf")


def test_unknown_tensor_is_refused(tmp_path: Path) -> None:
    writer = gguf_writer(tmp_path / "m.gguf")
    add_gguf_weights(writer, random_weights())
    writer.add_tensor("blk.0.ffn_gate_exps.weight", np.ones((2, 64), np.float32))
    finish_gguf(writer)
    with pytest.raises(ValueError, match=r"'blk.0.ffn_gate_exps.weight' is not known; .*blk.N"):
        open_checkpoint(tmp_path / "m.gguf")


def test_type_that_is_no_weight_is_refused(tmp_path: Path) -> None:
    writer = gguf_writer(tmp_path / "m.gguf")
    writer.add_tensor("token_embd.weight", np.ones((40, 64), np.int32))
    finish_gguf(writer)
    with pytest.raises(ValueError, match=r"'token_embd.weight' has type I32; allowed are F32"):
        open_checkpoint(tmp_path / "m.gguf")


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Path, int, int]:
    """The bytes of a model with a vocabulary, a path for damaged copies, where its header ends and
    where its last tensor does."""
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    writer = gguf_writer(path)
    writer.add_token_list(["a", "bc", "世"])
    writer.add_token_scores([0.0, 1.0, 2.0])
    add_gguf_weights(writer, random_weights())
    finish_gguf(writer)
    tensors = read_gguf(path).tensors.values()
    header_end = min(tensor.offset for tensor in tensors)
    data_end = max(tensor.offset + tensor.nbytes for tensor in tensors)
    return path.read_bytes(), path.with_name("damaged.gguf"), header_end, data_end


@given(data=st.data())
@settings(max_examples=100)
def test_truncated_file(whole_file: tuple[bytes, Path, int, int], data: st.DataObject) -> None:
    content, path, header_end, data_end = whole_file
    keep = data.draw(st.integers(0, header_end) | st.integers(header_end, data_end - 1))
    path.write_bytes(content[:keep])
    with pytest.raises(ValueError, match=r"damaged\.gguf: "):
        open_checkpoint(path)


@given(data=st.data())
@settings(max_examples=300)
def test_damaged_header_is_a_value_error_or_harmless(
    whole_file: tuple[bytes, Path, int, int], data: st.DataObject
) -> None:
    content, path, header_end, _ = whole_file
    damaged = bytearray(content)
    damaged[data.draw(st.integers(0, header_end - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(damaged)
    try:
        checkpoint = open_checkpoint(path)
    except ValueError as exc:
        assert "damaged.gguf: " in str(exc)  # noqa: PT017 (either outcome is right)
    else:
        assert len(list(checkpoint.tensors())) == len(checkpoint)


# Wrong magic; version 1; big-endian version 3; more tensors, or more metadata, than is allowed.
@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"GGML", "starts with b'GGML'; GGUF files start with b'GGUF'"),
        (b"GGUF\1\0\0\0", r"version 1; supported are \(2, 3\)"),
        (b"GGUF\0\0\0\3", "version 50331648; .*little-endian"),
        (b"GGUF\3\0\0\0" + b"\xff" * 8, "number of tensors is 18446744073709551615; at most"),
        (b"GGUF\3\0\0\0" + bytes(8) + b"\xff" * 8, "number of metadata entries is 1844.*at most"),
    ],
)
def test_start_of_the_file(
    whole_file: tuple[bytes, Path, int, int], start: bytes, message: str
) -> None:
    content, path, _, _ = whole_file
    path.write_bytes(start + content[len(start) :])
    with pytest.raises(ValueError, match=message):
        open_checkpoint(path)


def test_array_that_claims_more_than_the_file_holds(
    whole_file: tuple[bytes, Path, int, int],
) -> None:
    content, path, _, _ = whole_file
    key = b"tokenizer.ggml.scores"
    count_at = content.index(key) + len(key) + 8  # after the types of the value and of its items
    # 2^20 scores pass the limit on counts; the file, far shorter, cannot have them.
    path.write_bytes(content[:count_at] + (1 << 20).to_bytes(8, "little") + content[count_at + 8 :])
    with pytest.raises(ValueError, match=r"truncated: metadata 'tokenizer.ggml.scores'.*4194304"):
        open_checkpoint(path)


def test_demo_model(demo_model: Path) -> None:
    checkpoint = open_checkpoint(demo_model)
    config = checkpoint.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.rope_theta, config.rms_norm_eps) == (100000.0, 1e-5)
    assert config.tie_word_embeddings
    assert len(checkpoint) == 1 + 30 * 9 + 1
    assert checkpoint.tensor("model.embed_tokens.weight").shape == (49152, 576)
    k_proj = checkpoint.tensor("model.layers.29.self_attn.k_proj.weight")
    assert (k_proj.dtype, k_proj.shape) == (torch.float32, (192, 576))
