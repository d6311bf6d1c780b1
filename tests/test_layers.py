"""Data flows one way: kernels -> ops -> runtime. The imports are read, not run."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "echokernels"
KERNEL_FOLDERS = ("attention", "norm", "activation", "quant", "sampling", "moe")


def imports(path: Path) -> set[str]:
    """Every module that a file imports, at any depth."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (PACKAGE / folder).rglob("*.py"))


def uses(path: Path, module: str) -> bool:
    return any(name == module or name.startswith(module + ".") for name in imports(path))


@pytest.mark.parametrize("path", [*files(*KERNEL_FOLDERS), *PACKAGE.glob("_*.py")], ids=str)
def test_kernels_do_not_know_the_runtime(path):
    assert not uses(path, "echokernels.runtime")
    assert not uses(path, "echokernels.cli")


@pytest.mark.parametrize("path", files("runtime"), ids=str)
def test_the_runtime_does_not_know_triton(path):
    assert not uses(path, "triton")
    assert not uses(path, "echokernels.cli")


@pytest.mark.parametrize("path", files("runtime/models"), ids=str)
def test_models_know_layers_and_configs_only(path):
    allowed = tuple(
        f"echokernels.runtime.{name}" for name in ("layers", "config", "models", "batch")
    )
    own = {name for name in imports(path) if name.startswith("echokernels.runtime.")}
    assert all(name.startswith(allowed) for name in own), own


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=str)
def test_only_one_file_touches_torch_library(path):
    if path.name != "_library.py":
        assert "torch.library" not in path.read_text()


def test_the_reader_of_imports_sees_them():
    assert "triton.language" in imports(PACKAGE / "norm/rms_norm.py")
    assert uses(PACKAGE / "norm/rms_norm.py", "triton")
