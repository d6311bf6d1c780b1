"""The header of a GGUF file: metadata, and the place of every tensor. No weight is read.

Little-endian layout (GGUF versions 2 and 3, specification of the ggml project):

    "GGUF" | u32 version | u64 number of tensors | u64 number of metadata entries
    metadata entry:  string key | u32 type | value
                     string = u64 length, bytes;  array = u32 type, u64 count, values
    tensor entry:    string name | u32 rank | u64 dims[rank], fastest first | u32 type | u64 offset
    padding to a multiple of `general.alignment` | tensor data

The `gguf` package has a reader too. It keeps one NumPy view per vocabulary string, which takes
seconds for a large vocabulary, and believes every count, so that a damaged file can keep it busy
forever. Here each count and length is checked against what the file can hold.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGMLQuantizationType,
    GGUFValueType,
)

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)

# Far above any real model (vocabularies and merge lists have under a million entries), and low
# enough that a damaged count cannot exhaust the memory.
MAX_COUNT = 1 << 22
MAX_STRING_BYTES = 1 << 24
MAX_RANK = 4

_SCALAR_FORMATS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "?",
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True)
class GGUFTensor:
    """Where one tensor lies. `shape` is in PyTorch's order, `offset` and `nbytes` are bytes."""

    name: str
    ggml_type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GGUFFile:
    """`metadata` holds plain Python values; `data` is the whole file, mapped copy-on-write."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    data: np.memmap  # u8[file size]

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The metadata value of `key`, or `default` if there is none.

        Raises ValueError if the value is not of `kind`.
        """
        if key not in self.metadata:
            return default
        value = self.metadata[key]
        # bool is an int to Python, but a flag is no number in a model's metadata.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            wanted = (
                kind.__name__ if isinstance(kind, type) else " or ".join(k.__name__ for k in kind)
            )
            found = f"{type(value).__name__} {str(value)[:80]}"
            raise ValueError(f"{self.path}: metadata {key!r} is {found}; it must be {wanted}")
        return value

    def require(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """The metadata value of `key`. Raises ValueError if it is missing or not of `kind`."""
        if key not in self.metadata:
            raise ValueError(f"{self.path}: metadata {key!r} is missing")
        return self.get(key, kind)

    def raw(self, tensor: GGUFTensor) -> np.ndarray:
        """The stored bytes of `tensor`, a view u8[nbytes] of the mapped file."""
        return self.data[tensor.offset : tensor.offset + tensor.nbytes]


class _Cursor:
    """Reads values one after the other and never past the end of the file."""

    def __init__(self, path: Path, data: np.memmap) -> None:
        self.path = path
        self.data = data
        self.buffer = data.data
        self.offset = 0

    def error(self, problem: str) -> ValueError:
        return ValueError(f"{self.path}: not a usable GGUF file: {problem}")

    def advance(self, nbytes: int, what: str) -> int:
        """Steps over `nbytes` and returns where they start."""
        start = self.offset
        if nbytes > len(self.buffer) - start:
            raise self.error(
                f"truncated: {what} at byte {start} needs {nbytes} bytes "
                f"and {len(self.buffer) - start} are left"
            )
        self.offset = start + nbytes
        return start

    def u32(self, what: str) -> int:
        return _U32.unpack_from(self.buffer, self.advance(4, what))[0]

    def u64(self, what: str) -> int:
        return _U64.unpack_from(self.buffer, self.advance(8, what))[0]

    def count(self, what: str) -> int:
        count = self.u64(what)
        if count > MAX_COUNT:
            raise self.error(f"{what} is {count}; at most {MAX_COUNT} is allowed")
        return count

    def string(self, what: str) -> str:
        length = self.u64(what)
        if length > MAX_STRING_BYTES:
            raise self.error(f"{what} has {length} bytes; at most {MAX_STRING_BYTES} are allowed")
        start = self.advance(length, what)
        try:
            return str(self.buffer[start : self.offset], "utf-8")
        except UnicodeDecodeError as exc:
            raise self.error(f"{what} at byte {start} is not UTF-8") from exc

    def value_type(self, what: str) -> GGUFValueType:
        raw = self.u32(what)
        try:
            return GGUFValueType(raw)
        except ValueError:
            allowed = ", ".join(f"{t.value} {t.name}" for t in GGUFValueType)
            raise self.error(f"{what} has value type {raw}; known are {allowed}") from None

    def value(self, what: str) -> Any:
        kind = self.value_type(what)
        if kind is GGUFValueType.STRING:
            return self.string(what)
        if kind is not GGUFValueType.ARRAY:
            return self.scalars(kind, 1, what)[0]
        item_kind = self.value_type(what)
        count = self.count(f"the length of {what}")
        if item_kind is GGUFValueType.STRING:
            return [self.string(what) for _ in range(count)]
        if item_kind is GGUFValueType.ARRAY:
            raise self.error(f"{what} is an array of arrays, which is not supported")
        return self.scalars(item_kind, count, what)

    def scalars(self, kind: GGUFValueType, count: int, what: str) -> list[Any]:
        dtype = np.dtype(_SCALAR_FORMATS[kind])
        start = self.advance(count * dtype.itemsize, what)
        return np.frombuffer(self.buffer, dtype, count, start).tolist()


def read_gguf(path: Path) -> GGUFFile:
    """Reads the header of `path` and maps the file.

    Raises ValueError, with the path and what was found, for anything but a whole GGUF file.
    """
    try:
        # Copy-on-write, because PyTorch warns about tensors over read-only memory.
        data = np.memmap(path, np.uint8, mode="c")
    except (OSError, ValueError) as exc:  # ValueError: an empty file cannot be mapped
        raise ValueError(f"{path}: cannot be read: {exc}") from exc
    cursor = _Cursor(path, data)
    num_tensors, num_entries = _read_preamble(cursor)
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.string("a metadata key")
        if key in metadata:
            raise cursor.error(f"metadata {key!r} occurs twice")
        metadata[key] = cursor.value(f"metadata {key!r}")
    entries = [_read_tensor_entry(cursor) for _ in range(num_tensors)]
    return GGUFFile(
        path, metadata, _place_tensors(cursor, entries, _alignment(cursor, metadata)), data
    )


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    start = cursor.advance(4, "the magic number")
    magic = bytes(cursor.buffer[start : start + 4])
    if magic != MAGIC:
        raise cursor.error(f"it starts with {magic!r}; GGUF files start with {MAGIC!r}")
    version = cursor.u32("the version")
    if version not in SUPPORTED_VERSIONS:
        raise cursor.error(
            f"version {version}; supported are {SUPPORTED_VERSIONS}, stored little-endian"
        )
    return cursor.count("the number of tensors"), cursor.count("the number of metadata entries")


def _alignment(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise cursor.error(
            f"general.alignment is {alignment!r}; it must be a power of two and at least 8"
        )
    return alignment


def _read_tensor_entry(cursor: _Cursor) -> GGUFTensor:
    """One tensor entry; its offset still counts from the start of the tensor data."""
    name = cursor.string("a tensor name")
    rank = cursor.u32(f"the rank of {name!r}")
    if not 1 <= rank <= MAX_RANK:
        raise cursor.error(f"tensor {name!r} has rank {rank}; allowed are 1 to {MAX_RANK}")
    shape = tuple(reversed([cursor.u64(f"the shape of {name!r}") for _ in range(rank)]))
    raw_type = cursor.u32(f"the type of {name!r}")
    offset = cursor.u64(f"the offset of {name!r}")
    try:
        ggml_type = GGMLQuantizationType(raw_type)
    except ValueError:
        known = ", ".join(f"{t.value} {t.name}" for t in GGMLQuantizationType)
        raise cursor.error(f"tensor {name!r} has type {raw_type}; known are {known}") from None
    block_size, block_bytes = GGML_QUANT_SIZES[ggml_type]
    if shape[-1] % block_size:
        raise cursor.error(
            f"tensor {name!r} has rows of {shape[-1]}; "
            f"{ggml_type.name} needs a multiple of {block_size}"
        )
    nbytes = math.prod(shape) // block_size * block_bytes
    return GGUFTensor(name, ggml_type, shape, offset, nbytes)


def _place_tensors(
    cursor: _Cursor, entries: list[GGUFTensor], alignment: int
) -> dict[str, GGUFTensor]:
    """Turns offsets into offsets from the start of the file, checked against its size."""
    data_start = math.ceil(cursor.offset / alignment) * alignment
    file_size = len(cursor.buffer)
    tensors: dict[str, GGUFTensor] = {}
    for entry in entries:
        start = data_start + entry.offset
        if entry.name in tensors:
            raise cursor.error(f"tensor {entry.name!r} occurs twice")
        if entry.offset % alignment:
            raise cursor.error(
                f"tensor {entry.name!r} has offset {entry.offset}; "
                f"it must be a multiple of the alignment {alignment}"
            )
        if start + entry.nbytes > file_size:
            raise cursor.error(
                f"truncated: tensor {entry.name!r} ends at byte {start + entry.nbytes} "
                f"of a file of {file_size} bytes"
            )
        tensors[entry.name] = GGUFTensor(
            entry.name, entry.ggml_type, entry.shape, start, entry.nbytes
        )
    return tensors
