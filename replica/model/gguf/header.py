"""The header of a GGUF file: metadata, and the place of each tensor.

The file may come from anywhere: every length in it is held against the file's size, and against limits, before it is
believed. https://github.com/ggml-org/ggml/blob/master/docs/gguf.md describes the format.
"""

import os
import stat
import struct
from array import array
from pathlib import Path
from typing import BinaryIO, NoReturn, TypeAlias

from msgspec import Struct

MAGIC = b"GGUF"
LENGTH = struct.Struct("<Q")  # a text's length comes first
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 32 * 2**20  # vocabularies of 260,000 tokens take some 8 MB
MAX_VALUES = 2**20  # the values of one list
MAX_TENSORS = 2**16
MAX_DIMENSIONS = 4
ALIGNMENT = 32  # unless the file says another
MAX_ALIGNMENT = 2**16
F32 = 0  # a tensor's type
STRING, LIST = 8, 9
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

Scalar: TypeAlias = str | int | float | bool
Value: TypeAlias = "Scalar | list[str] | array[int] | array[float]"


class Tensor(Struct, frozen=True):
    shape: tuple[int, ...]  # rows first, as numpy has it
    type: int  # one of ggml's numbers
    start: int  # the place of its bytes in the file


class Header(Struct, frozen=True):
    file: Path
    metadata: dict[str, Value]
    tensors: dict[str, Tensor]

    def scalar(self, key: str, default: Scalar | None = None) -> Scalar | None:
        value = self.metadata.get(key, default)
        if isinstance(value, list | array):
            raise self.refused(f"{key} is a list, one for each layer, which is not supported")
        return value

    def strings(self, key: str) -> list[str]:
        value = self.metadata.get(key)
        if not isinstance(value, list):
            raise self.refused(f"it has no list of strings {key}; get the file again")
        return value

    def numbers(self, key: str, count: int) -> "array[int] | array[float]":
        value = self.metadata.get(key)
        if not isinstance(value, array) or len(value) != count:
            raise self.refused(f"it has no list of {count} numbers {key}; get the file again")
        return value

    def refused(self, why: str) -> ValueError:
        return ValueError(f"{self.file}: {why}")


def read_header(file: Path) -> Header:
    """ValueError, on one line, for a file that is damaged, cut short, or no GGUF."""
    # A pipe would be waited for.
    with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise ValueError(f"{file} is neither a folder nor a regular file; name a GGUF file or a model's folder")
        return _Reader(file, opened).read()


class _Reader:
    def __init__(self, file: Path, opened: BinaryIO) -> None:
        self._file = file
        self._size = os.fstat(opened.fileno()).st_size
        self._bytes, self._at = opened.read(MAX_HEADER_BYTES), len(MAGIC)

    def read(self) -> Header:
        if (magic := self._bytes[: len(MAGIC)]) != MAGIC:
            raise ValueError(
                f"{self._file} is not a GGUF file: it begins with {magic!r}; name one, or a model's folder"
            )
        if (version := self._number("I")) not in VERSIONS:
            raise ValueError(f"{self._file} is GGUF of version {version}; only 2 and 3, little-endian, are supported")
        tensors, pairs = self._count(MAX_TENSORS, "tensors"), self._count(MAX_VALUES, "metadata")
        metadata = {self._string(): self._value() for _ in range(pairs)}
        places = {}
        for _ in range(tensors):
            name, dimensions = self._string(), self._number("I")
            if not 0 < dimensions <= MAX_DIMENSIONS:
                self._damaged(f"a tensor has {dimensions} dimensions")
            columns_first = [self._number("Q") for _ in range(dimensions)]
            places[name] = Tensor(tuple(reversed(columns_first)), self._number("I"), self._number("Q"))
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= MAX_ALIGNMENT:
            self._damaged(f"general.alignment is {alignment!r:.80}")
        start = -(-self._at // alignment) * alignment
        for name, tensor in places.items():
            if start + tensor.start >= self._size:
                self._damaged(f"it ends before the tensor {name!r:.80}")
        moved = {name: Tensor(tensor.shape, tensor.type, start + tensor.start) for name, tensor in places.items()}
        return Header(self._file, metadata, moved)

    def _value(self) -> Value:
        kind = self._number("I")
        if kind != LIST:
            return self._string() if kind == STRING else self._number(self._code(kind))
        kind, count = self._number("I"), self._count(MAX_VALUES, "values of a list")
        if kind == STRING:
            return [self._string() for _ in range(count)]
        values: array[int] | array[float] = array(self._code(kind).replace("?", "B"))
        values.frombytes(self._take(count * values.itemsize))
        return values

    def _code(self, kind: int) -> str:
        if kind not in NUMBERS:
            self._damaged(f"a value has the type {kind}")
        return NUMBERS[kind]

    def _count(self, most: int, what: str) -> int:
        if (count := self._number("Q")) > most:
            self._damaged(f"{count} {what} are too many")
        return count

    def _string(self) -> str:
        try:
            (length,) = LENGTH.unpack(self._take(LENGTH.size))
            return self._take(length).decode()
        except UnicodeDecodeError as error:
            self._damaged(f"a text is not UTF-8 ({error.reason})")

    def _number(self, code: str) -> int:
        """An int by the type, though "f", "d" and "?" give others."""
        number: int
        (number,) = struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))
        return number

    def _take(self, count: int) -> bytes:
        start, self._at = self._at, self._at + count
        if self._at > len(self._bytes):
            self._damaged(f"its header does not end within {len(self._bytes)} bytes")
        return self._bytes[start : self._at]

    def _damaged(self, why: str) -> NoReturn:
        raise ValueError(f"{self._file} ({self._size} bytes) is not a whole GGUF file: {why}; get it again")
