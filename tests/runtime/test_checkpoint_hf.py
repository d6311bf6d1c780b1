"""Hugging Face folders: what is read, and that everything missing or damaged is said clearly."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from echokernels.runtime.checkpoint import open_checkpoint
from tests.runtime.model_files import random_weights, write_hf_folder, write_json

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_hf_folder(tmp_path, random_weights())


def rewrite_index(folder: Path, name: str, file: object) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][name] = file
    write_json(folder / INDEX, index)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_come_as_stored(tmp_path: Path, shards: int, dtype: torch.dtype) -> None:
    weights = {name: tensor.to(dtype) for name, tensor in random_weights().items()}
    checkpoint = open_checkpoint(write_hf_folder(tmp_path, weights, shards))
    read = dict(checkpoint.tensors())
    assert set(read) == set(checkpoint.names()) == set(weights)
    assert len(checkpoint) == len(weights)
    for name, expected in weights.items():
        assert read[name].dtype == dtype
        assert torch.equal(read[name], expected)
        assert torch.equal(checkpoint.tensor(name), expected)


def test_config_is_that_of_the_folder(folder: Path) -> None:
    config = open_checkpoint(folder).config
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.rope_theta, config.bos_token_id, config.eos_token_ids) == (50000.0, 1, (2,))


def test_generation_config_says_what_ends_a_generation(folder: Path) -> None:
    write_json(folder / "generation_config.json", {"eos_token_id": [7, 2]})
    assert open_checkpoint(folder).config.eos_token_ids == (7, 2)


def test_tied_embedding_not_lost_without_lm_head(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path, random_weights(tied=True), tie_word_embeddings=True)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config.tie_word_embeddings
    assert "lm_head.weight" not in checkpoint.names()


def test_tied_embedding_wins_over_a_stored_copy(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path, random_weights(), tie_word_embeddings=True)
    checkpoint = open_checkpoint(folder)
    assert "lm_head.weight" not in checkpoint.names()
    with pytest.raises(ValueError, match=r"no tensor 'lm_head.weight'"):
        checkpoint.tensor("lm_head.weight")


def test_untied_model_without_lm_head_is_refused(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path, random_weights(tied=True))
    with pytest.raises(ValueError, match=r"no tensor 'lm_head.weight'.*tie_word_embeddings"):
        open_checkpoint(folder)


def test_shards_may_be_links_as_in_a_download_cache(tmp_path: Path) -> None:
    weights = random_weights()
    folder = write_hf_folder(tmp_path / "snapshot", weights, shards=2)
    (tmp_path / "blobs").mkdir()
    for shard in folder.glob("*.safetensors"):
        blob = shard.rename(tmp_path / "blobs" / shard.stem)
        shard.symlink_to(blob)
    assert torch.equal(open_checkpoint(folder).tensor("lm_head.weight"), weights["lm_head.weight"])


def test_unknown_tensor_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"no tensor 'model.layers.9.x'.*model\."):
        open_checkpoint(folder).tensor("model.layers.9.x")


@pytest.mark.parametrize("name", ["absent", "model.safetensors", "config.json"])
def test_path_must_be_a_folder_or_gguf_file(folder: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}.*folder with config.json.*\.gguf"):
        open_checkpoint(folder / name)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickled_weights_are_never_loaded(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ValueError, match=rf"only pickled weights \({name}\).*safetensors"):
        open_checkpoint(folder)


def test_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"found no weights; model.safetensors or"):
        open_checkpoint(folder)


def test_shards_without_an_index(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path, random_weights(), shards=2)
    (folder / INDEX).unlink()
    with pytest.raises(ValueError, match=r"00001-of-00002.safetensors without an index"):
        open_checkpoint(folder)


def test_missing_shard(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path, random_weights(), shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"'model-00002-of-00002.safetensors', which is missing"):
        open_checkpoint(folder)


# Out of the folder, in several ways; a pickle; no name at all.
@pytest.mark.parametrize(
    "file", ["../x.safetensors", "/x.safetensors", "a\\x.safetensors", "..", "x.bin", "", 3]
)
def test_shard_path_must_stay_in_the_folder(tmp_path: Path, file: object) -> None:
    folder = write_hf_folder(tmp_path / "model", random_weights(), shards=2)
    save_file({"model.norm.weight": torch.zeros(64)}, tmp_path / "x.safetensors")
    rewrite_index(folder, "model.norm.weight", file)
    with pytest.raises(
        ValueError, match=r"index.json: .*model.norm.weight.*named without a folder"
    ):
        open_checkpoint(folder)


def test_index_that_names_a_tensor_its_shard_has_not(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path, random_weights(), shards=2)
    rewrite_index(folder, "model.extra", "model-00001-of-00002.safetensors")
    with pytest.raises(
        ValueError, match=r"00001-of-00002.safetensors: has no tensor 'model.extra'"
    ):
        open_checkpoint(folder)


@pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
def test_index_without_weight_map(folder: Path, weight_map: object) -> None:
    write_json(folder / INDEX, {"weight_map": weight_map})
    with pytest.raises(ValueError, match="'weight_map' must be an object"):
        open_checkpoint(folder)


# Nothing; part of the length of the header; part of the header; all but the last byte.
@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_weights(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model.safetensors: not a usable safetensors file"):
        open_checkpoint(folder)


# Larger than any memory; just above the library's limit of 100 MB.
@pytest.mark.parametrize("length", [2**63, 100_000_001])
def test_size_of_the_safetensors_header_is_bounded(folder: Path, length: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(ValueError, match=r"model.safetensors: not a usable .*(?i:too ?large)"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '"x"', pytest.param("[" * 100_000, id="too deep"), "\ud800"],
)
def test_config_that_is_no_json_object(folder: Path, content: str) -> None:
    (folder / "config.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(ValueError, match=r"config.json: "):
        open_checkpoint(folder)


def test_config_that_is_missing(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config.json: file not found"):
        open_checkpoint(folder)


def test_config_that_is_far_too_large(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echokernels.runtime.json_file.MAX_JSON_BYTES", 10)
    with pytest.raises(ValueError, match=r"config.json: \d+ bytes; at most 10"):
        open_checkpoint(folder)


@pytest.mark.parametrize("model_type", ["mamba", None, ["llama"]])
def test_unknown_architecture(tmp_path: Path, model_type: object) -> None:
    folder = write_hf_folder(tmp_path, random_weights(), model_type=model_type)
    with pytest.raises(ValueError, match=r"config.json: architecture is .*must be one of llama"):
        open_checkpoint(folder)


def test_invalid_field_of_config_is_named_with_the_file(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path, random_weights(), num_key_value_heads=3)
    with pytest.raises(ValueError, match=r"config.json: .*num_heads is 4"):
        open_checkpoint(folder)
