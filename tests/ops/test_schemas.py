"""The registered schemas are the contract, word for word: other engines are built against them."""

from pathlib import Path

import pytest
import torch

import echokernels  # noqa: F401  (registers the ops)
from echokernels._library import OPS

CONTRACT = {
    line.split("(")[0]: line
    for line in (Path(__file__).parent.parent / "data/schemas.txt").read_text().splitlines()
    if line and not line.startswith("#")
}


@pytest.mark.parametrize("name", sorted(OPS))
def test_schema_is_the_contract(name):
    assert OPS[name].schema == CONTRACT[name]
    assert str(getattr(torch.ops.echo, name).default._schema).startswith(f"echo::{name}(")


def test_every_op_has_all_its_forms():
    for op in OPS.values():
        for key in ("CUDA", "CPU", "Meta"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"echo::{op.name}", key) or (
                key == "Meta" and torch._library.simple_registry.singleton.find(f"echo::{op.name}")
            )
