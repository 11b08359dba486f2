"""GGUF files: metadata and tensors, every length in them held against the file's.

The format is described in ggml's `docs/gguf.md`. A damaged file must end in an error,
so nothing here trusts a length: what is read always lies within the mapped bytes, and
lists grow only as fast as the bytes that fill them. The `gguf` package gives the
tensors' types and how they become floats.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
# Kinds of values by number; 8 is a string and 9 an array.
_NUMBERS = "u1 i1 u2 i2 u4 i4 f4 ? . . u8 i8 f8".split()
_STRING, _ARRAY = 8, 9
_MAX_KEY, _MAX_NAME, _MAX_TEXT, _MAX_DIMENSIONS = 65535, 64, 1 << 20, 4
_MAX_PROBLEMS = 8  # tensors named one by one: a damaged header may spoil them all
_CONVERT = "convert the file again with a llama.cpp of today"


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """Where a tensor lies; `kind` is None where its type is unknown."""

    shape: tuple[int, ...]  # row-major
    kind: Any
    start: int
    size: int  # bytes


class _Header:
    """Reads a header from its start, with one error for whatever lies past the end."""

    def __init__(self, path: Path, data: np.ndarray):
        self._path, self._view, self.at = path, memoryview(data), 0

    def take(self, size: int, what: str) -> memoryview:
        """The next bytes.

        Raises:
          ValueError: the file ends before.
        """
        end = self.at + size
        if end > len(self._view):
            raise self.error(
                f"{what} needs {end:,} bytes and the file has {len(self._view):,}: an "
                "incomplete download, or a damaged file"
            )
        taken, self.at = self._view[self.at : end], end
        return taken

    def error(self, words: str) -> ValueError:
        return ValueError(f"{str(self._path)!r} is not a readable GGUF file: {words}")

    def number(self, letter: str, what: str) -> int:
        return struct.unpack(f"<{letter}", self.take(struct.calcsize(letter), what))[0]

    def name(self, what: str, limit: int) -> str:
        """A key or a name of a tensor."""
        if (size := self.number("Q", what)) > limit:
            raise self.error(
                f"{what} has a name of {size:,} bytes, which is more than {limit:,}: a "
                "damaged file"
            )
        return str(self.take(size, what), "utf-8", "backslashreplace")

    def string(self, what: str) -> str | bytes:
        """A text; its bytes where they are no UTF-8 or too many to be meant."""
        text = self.take(self.number("Q", what), what)
        try:
            return bytes(text) if len(text) > _MAX_TEXT else str(text, "utf-8")
        except UnicodeDecodeError:
            return bytes(text)

    def value(self, key: str) -> object:
        """A metadata value; an array of numbers stays a view of the file."""
        what = f"the value of {key[:60]!r}"
        kind = self.number("I", what)
        if kind == _STRING:
            return self.string(what)
        if kind != _ARRAY:
            return self._numbers(kind, 1, what)[0].item()
        kind, count = self.number("I", what), self.number("Q", what)
        if kind != _STRING:
            return self._numbers(kind, count, what)
        return [self.string(what) for _ in range(count)]

    def _numbers(self, kind: int, count: int, what: str) -> np.ndarray:
        name = _NUMBERS[kind] if kind < len(_NUMBERS) else "."
        if name == ".":
            raise self.error(f"{what} is of kind {kind}, which does not exist here")
        dtype = np.dtype(name).newbyteorder("<")
        return np.frombuffer(self.take(count * dtype.itemsize, what), dtype)


class GGUFFile:
    """A memory-mapped GGUF file: its metadata, and its tensors one at a time.

    Attributes:
      path: of the file.
      metadata: keys to str, int, float, bool, lists of str, arrays of numbers; a text
        that is no UTF-8 or longer than 1 MiB stays bytes.
      problems: what is wrong with the tensors, a line each; `gguf.describe` reports
        them together with those of the metadata.
    """

    def __init__(self, path: str | Path):
        """Opens the file; `~` in the path is the home folder.

        Raises:
          FileNotFoundError: nothing at `path`.
          ValueError: a folder, not a GGUF file, or one whose header is damaged.
        """
        self.path = Path(path).expanduser()
        _check_path(self.path)
        empty = self.path.stat().st_size == 0  # which cannot be mapped
        self._data = (
            np.empty(0, np.uint8) if empty else np.memmap(self.path, np.uint8, "r")
        )
        header = _Header(self.path, self._data)
        num_tensors, num_keys = _preamble(header)
        self.metadata: dict[str, object] = {}
        for index in range(num_keys):
            key = header.name(f"metadata key {index + 1} of {num_keys}", _MAX_KEY)
            if key in self.metadata:
                raise header.error(f"the key {key[:60]!r} is there twice")
            self.metadata[key] = header.value(key)
        self.problems: list[str] = []
        self._tensors = self._read_tensors(header, num_tensors)

    def _read_tensors(self, header: _Header, count: int) -> dict[str, _Tensor]:
        infos = [_tensor_info(header, index, count) for index in range(count)]
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise header.error(f"general.alignment {alignment!r} is no power of two")
        first = expected = _padded(header.at, alignment)
        tensors: dict[str, _Tensor] = {}
        for name, shape, number, offset in infos:
            if name in tensors:
                raise header.error(f"the tensor {name!r} is there twice")
            kind, size, problem = _stored(shape, number)
            # Without a size, whatever the next tensor says must do.
            if problem is None and expected not in (None, first + offset):
                problem = (
                    f"has offset {offset} and not {expected - first}, where the tensor "
                    f"before it ends (aligned to {alignment}); {_CONVERT}"
                )
            if problem:
                self.problems.append(f"tensor {name!r} {problem}")
            start = first + offset
            tensors[name] = _Tensor(shape, kind, start, size)
            expected = _padded(start + size, alignment) if problem is None else None
        del self.problems[_MAX_PROBLEMS:]
        self._check_end(tensors)
        return tensors

    def _check_end(self, tensors: dict[str, _Tensor]) -> None:
        end = max(
            (tensor.start + tensor.size for tensor in tensors.values()), default=0
        )
        if end > len(self._data):
            self.problems.append(
                f"the tensors need {end:,} bytes and the file has "
                f"{len(self._data):,}: an incomplete download? Fetch it again"
            )

    def names(self) -> set[str]:
        """Names of the tensors."""
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor in row-major order, without reading it."""
        return self._tensors[name].shape

    def read(self, name: str) -> np.ndarray:
        """Dequantizes one tensor to f32, row-major."""
        import gguf

        tensor = self._tensors[name]
        stored = self._data[tensor.start : tensor.start + tensor.size]
        rows = stored.reshape(*tensor.shape[:-1], -1)
        return gguf.dequantize(rows, tensor.kind).reshape(tensor.shape)


def _check_path(path: Path) -> None:
    if path.is_dir():
        files = sorted(file.name for file in path.glob("*.gguf"))[:3]
        inside = f"; in it: {', '.join(files)}" if files else ""
        raise ValueError(
            f"{str(path)!r} is a folder; what is supported today is one GGUF file: "
            f"pass the path of a .gguf file{inside}"
        )
    if not path.is_file():
        raise FileNotFoundError(f"no GGUF file at {str(path)!r}")


def _preamble(header: _Header) -> tuple[int, int]:
    """Numbers of tensors and of metadata keys, after the magic and the version."""
    start = bytes(header.take(4, "the magic number"))
    if start != _MAGIC:
        raise header.error(f"it starts with {start!r}, not with {_MAGIC!r}")
    version = header.number("I", "the version")
    if version and version % 65536 == 0:
        raise header.error(
            "it is big-endian; supported: little-endian. Convert it with "
            "`gguf-convert-endian FILE little`"
        )
    if version not in _VERSIONS:
        raise header.error(f"version {version}; supported: 2 and 3; {_CONVERT}")
    return header.number("Q", "the header"), header.number("Q", "the header")


def _tensor_info(header: _Header, index: int, count: int) -> tuple:
    """Name, row-major shape, number of the type and offset of the next tensor."""
    what = f"tensor {index + 1} of {count} in the header"
    name = header.name(what, _MAX_NAME)
    dimensions = header.number("I", what)
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise header.error(
            f"tensor {name!r} has {dimensions} dimensions; the format has 1 to "
            f"{_MAX_DIMENSIONS}"
        )
    sizes = [header.number("Q", what) for _ in range(dimensions)]
    number, offset = header.number("I", what), header.number("Q", what)
    return name, tuple(reversed(sizes)), number, offset


def _stored(shape: tuple[int, ...], number: int) -> tuple[Any, int, str | None]:
    """A tensor's type and bytes, and what makes it unreadable."""
    import gguf

    kind = _kind(number)
    if kind is None:
        return None, 0, _unreadable(number)
    block, block_size = gguf.GGML_QUANT_SIZES[kind]
    problem = None
    if shape[-1] % block or 0 in shape:
        problem = (
            f"of shape {shape} has no whole blocks of {block}, as {kind.name} needs"
        )
    return kind, math.prod(shape) // block * block_size, problem


def _unreadable(number: int) -> str:
    import gguf

    known = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
    readable = [name for value, name in known.items() if _kind(value) is not None]
    return (
        f"is of type {known.get(number, number)}, which the installed gguf package "
        f"cannot read (unknown, removed or newer); it reads {', '.join(readable)}. "
        "Update the package, or quantise the model again"
    )


@functools.cache
def _kind(number: int) -> Any:
    """The type of that number; None unless the package can turn it into floats."""
    import gguf

    try:
        kind = gguf.GGMLQuantizationType(number)
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (ValueError, NotImplementedError):
        return None
    return kind


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
