"""The file of measured figures: kept whole, and ignored when it is not."""

import json
import warnings

import pytest

from echokernels import _calibration

H200, A100 = "NVIDIA H200", "NVIDIA A100"
ENTRIES = {"decode d128 bfloat16 g4": {"programs_per_sm": 5, "min_keys": 128}}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ECHOKERNELS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_is_saved_is_found_again_by_the_gpus_name(folder):
    assert _calibration.load(H200) == {}
    file = _calibration.save(H200, ENTRIES)
    assert file == folder / "calibration.json"
    assert _calibration.load(H200) == ENTRIES
    assert _calibration.load(A100) == {}
    _calibration.save(A100, {"other": {"x": 1}})
    _calibration.save(H200, {})
    assert (_calibration.load(H200), _calibration.load(A100)) == ({}, {"other": {"x": 1}})
    assert [path.name for path in folder.iterdir()] == ["calibration.json"]


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "null", '{"version": 0, "gpus": {}}', '{"version": 1}',
        '{"version": 1, "gpus": {"NVIDIA H200": {"decode": {"x": "much"}}}}',
        '{"version": 1, "gpus": {"NVIDIA H200": [1]}}', b"\xff\xfe",
    ],
)  # fmt: skip
def test_a_broken_file_is_ignored_with_a_warning_and_replaced(folder, content):
    folder.mkdir()
    file = folder / "calibration.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.warns(UserWarning, match="calibration.json is ignored: .*echokernels calibrate"):
        assert _calibration.load(H200) == {}
    _calibration.save(H200, ENTRIES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _calibration.load(H200) == ENTRIES


def test_a_failed_write_leaves_what_was_there(folder, monkeypatch):
    _calibration.save(H200, ENTRIES)

    def fail(*_args, **_kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(json, "dump", fail)
    with pytest.raises(OSError, match="no space left"):
        _calibration.save(H200, {})
    assert _calibration.load(H200) == ENTRIES
    assert [path.name for path in folder.iterdir()] == ["calibration.json"]


def test_the_folder_is_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("ECHOKERNELS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _calibration.path() == tmp_path / "echokernels" / "calibration.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _calibration.path() == tmp_path / ".cache" / "echokernels" / "calibration.json"
