"""TMA descriptors among the arguments of a launch that is replayed.

Triton's Python launcher takes a descriptor apart and encodes it at every launch. Its C launcher,
where that is called, takes the encoded one, its shape and its strides; encoding again is only
needed at addresses that were not seen before, and allocators give the same ones again and again.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import triton

# Encoded descriptors that one argument remembers, of 128 bytes each.
_MOST_MAPS = 256


class Argument(NamedTuple):
    """What a launcher takes for a descriptor: `at(pointer)`, then `rest`."""

    at: Callable[[int], Any]
    rest: tuple[Any, ...]


class _Base(NamedTuple):
    """What a descriptor needs of its base tensor at launch."""

    pointer: int

    def data_ptr(self) -> int:
        return self.pointer


def for_python_launcher(descriptor: Any) -> Argument:
    without_base = copy.copy(descriptor)
    without_base.base = None

    def at(pointer: int) -> Any:
        based = copy.copy(without_base)
        based.base = _Base(pointer)
        return based

    return Argument(at, ())


def for_c_launcher(descriptor: Any, metadata: dict[str, Any]) -> Argument:
    """`metadata` is what the compiler noted of this argument."""
    # Where Triton 3.6, whose C launcher is called, has it.
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    encode = triton.runtime.driver.active.utils.fill_tma_descriptor
    shape, strides = [*descriptor.shape], [*descriptor.strides]
    constants = (
        metadata["swizzle"], metadata["elem_size"],
        TMA_DTYPE_DEVICE_TO_HOST[metadata["elem_type"]], metadata["block_size"], shape, strides,
        int(descriptor.padding == "nan"),
    )  # fmt: skip
    maps: dict[int, Any] = {}

    def at(pointer: int) -> Any:
        found = maps.get(pointer)
        if found is None:
            if len(maps) >= _MOST_MAPS:
                maps.clear()
            found = maps[pointer] = encode(pointer, *constants)
        return found

    return Argument(at, (*shape, *strides))


def unwrapped(launch: Any) -> tuple[Any, list[dict[str, Any]]] | None:
    """(the C launcher, what the compiler noted of each descriptor) behind the function with which
    Triton 3.6 wraps a launcher for descriptors. None if `launch` is not one that is known."""
    names = getattr(getattr(launch, "__code__", None), "co_freevars", ())
    if not {"launcher", "tensordesc_meta", "tensordesc_indices"} <= {*names}:
        return None
    cells = dict(zip(names, launch.__closure__, strict=True))
    notes = cells["tensordesc_meta"].cell_contents
    if any(note is None or note["fp4_padded"] for note in notes):
        return None
    return cells["launcher"].cell_contents, notes
