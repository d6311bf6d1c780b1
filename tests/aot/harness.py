"""Compiles what an op would launch, for a GPU that is not there.

The op's own launcher runs on meta tensors (shapes and dtypes without memory) with the target
assumed; each launch it would make is caught and its kernel compiled with the same arguments. So the
tests cover exactly the shipped configurations.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from echokernels import _launch
from echokernels._library import OPS
from echokernels._target import KNOWN_TARGETS, Target, assume

TARGETS = tuple(KNOWN_TARGETS)
_POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def compile_op(op: str, target_name: str, *args: Any) -> list[Any]:
    """The kernels that `torch.ops.echo.<op>(*args)` would launch on the target, compiled. `args`
    hold meta tensors."""
    OPS[op].check(*args)
    return compile_launch(OPS[op].triton, target_name, *args)


def compile_launch(launcher: Callable[..., None], target_name: str, *args: Any) -> list[Any]:
    """The same of a launcher that an op calls."""
    target = KNOWN_TARGETS[target_name]
    compiled: list[Any] = []

    def compile_instead(kernel: Any, _grid: Any, values: Any, options: dict[str, Any]) -> None:
        compiled.append(compile_kernel(kernel, values, options, target))

    with mock.patch.object(_launch, "_run", compile_instead), assume(target):
        launcher(*args)
    assert compiled, "nothing was launched for these arguments"
    for kernel in compiled:
        assert kernel.metadata.shared <= target.shared_memory, (
            f"{kernel.name}: {kernel.metadata.shared} B shared"
        )
        if target.backend == "cuda":
            assert not uneven_sums(kernel), f"{kernel.name}: sums differ from thread to thread"
    return compiled


def compile_kernel(
    kernel: Any, values: tuple[Any, ...], options: dict[str, Any], target: Target
) -> Any:
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    given = dict(zip(kernel.arg_names, values, strict=False)) | {
        name: value for name, value in options.items() if name in kernel.arg_names
    }
    for index, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        # What is 1 is a constant to Triton as well.
        is_one = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or is_one:
            signature[parameter.name] = "constexpr"
            constants[index,] = value
            continue
        signature[parameter.name] = _type(value)
        if _divisible(value) and not parameter.do_not_specialize:
            attributes[index,] = [["tt.divisibility", 16]]
    compiler_options = {k: v for k, v in options.items() if k not in kernel.arg_names}
    source_class = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = source_class(kernel, signature, constants, attributes)
    gpu = GPUTarget(target.backend, target.arch, target.warp_size)
    return triton.compile(source, target=gpu, options=compiler_options)


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, TensorDescriptor):
        element = _POINTERS[value.base.dtype].removeprefix("*")
        return f"tensordesc<{element}{value.block_shape},{value.layout!r}>"
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    assert isinstance(value, float), f"no type for {value!r}"
    return "fp32"


def _divisible(value: Any) -> bool:
    # PyTorch's allocations are aligned to more than 16 bytes.
    return isinstance(value, torch.Tensor) or (
        isinstance(value, int) and not isinstance(value, bool) and value % 16 == 0
    )


def global_accesses(kernel: Any, *, wide: bool) -> list[str]:
    """ "ld" and "st" for the loads and stores of a CUDA kernel from and to global memory that are
    16 bytes wide, or for all others."""
    accesses = re.findall(r"(ld|st)\.global(\S*)", kernel.asm["ptx"])
    return [kind for kind, rest in accesses if (".v4.b32" in rest) == wide]


def uneven_sums(kernel: Any) -> list[str]:
    """Instructions of a CUDA kernel in which lanes that add each other's products get other sums.

    A lane that has p = x * y and gets q from another may compute fma(x, y, q), the other one
    fma(z, w, p): one of the products is rounded, in each lane another one. A branch on such a sum
    can take lanes of one warp apart, which then wait for each other for ever.
    """
    from_others: set[str] = set()
    products: set[str] = set()
    found = []
    for line in kernel.asm["ptx"].splitlines():
        operation, *operands = line.strip().rstrip(";").replace(",", " ").split() or [""]
        out, sources = operands[:1], set(operands[1:])
        if operation.startswith("shfl.") or (operation == "mov.b32" and sources & from_others):
            from_others |= {*out}
        elif operation == "mul.f32":
            products |= {*out}
        elif operation == "fma.rn.f32":
            found += [line] if {*operands[3:]} & from_others else []
        elif operation == "add.f32":  # which the assembler may fuse as well
            found += [line] if sources & from_others and sources & products else []
    return found


def local_memory(kernel: Any) -> int:
    """Bytes of stack and local memory a thread of a CUDA kernel uses: what has no register."""
    report = _inspect(kernel, "cuobjdump", "--dump-resource-usage")
    sizes = re.findall(r"(?:STACK|LOCAL):(\d+)", report)
    assert sizes, f"no resource usage in: {report}"
    return sum(map(int, sizes))


def spills_in_loops(kernel: Any) -> list[str]:
    """Instructions inside loops of a CUDA kernel that touch local memory."""
    return [line for body in loops(kernel) for line in body if re.search(r"\b(LDL|STL)\b", line)]


def product_loop(kernel: Any) -> list[str]:
    """The instructions of the innermost loop of a CUDA kernel that uses the tensor cores."""
    product = re.compile(r"\bHG?MMA\b")
    return min((body for body in loops(kernel) if any(map(product.search, body))), key=len)


def loops(kernel: Any) -> Iterator[list[str]]:
    """The instructions of each loop of a CUDA kernel."""
    lines = _inspect(kernel, "nvdisasm", "-c").splitlines()
    labels = {line.strip(": "): at for at, line in enumerate(lines) if line.startswith(".L_")}
    assert labels, "no labels in the disassembly"
    for at, line in enumerate(lines):
        jump = re.search(r"\bBRA `\((\.L_\w+)\)", line)
        # A jump backwards closes a loop; one to itself is the padding after the end.
        if jump and labels[jump[1]] < at - 1:
            yield [code.strip() for code in lines[labels[jump[1]] : at]]


def _inspect(kernel: Any, tool: str, option: str) -> str:
    path = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(path), option, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


CODES = [
    (code, target)
    for code in (torch.int8, torch.float8_e4m3fn)
    for target in TARGETS
    if code == torch.int8 or target != "sm_80"
]
"""Dtypes of codes, each with the targets that have a cast to it."""


def meta_pages(
    kv_heads: int, head_dim: int, dtype: torch.dtype, num_pages: int = 64
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A cache, and its scales if `dtype` is one of codes."""
    cache = meta(num_pages, 16, kv_heads, head_dim, dtype=dtype)
    is_codes = dtype in (torch.int8, torch.float8_e4m3fn)
    return cache, meta(num_pages, 16, kv_heads, dtype=torch.float32) if is_codes else None


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
