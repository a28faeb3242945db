"""A GGUF's header is read as it was written; a damaged or hostile one is refused, on one line."""

import os
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader

from replica.model.gguf.header import read_header
from tests.replica.model.gguf.files import folder_of, gguf_of, write_gguf

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "text": "Grüße, 東京",
    "whole": 2**32 - 1,
    "part": 0.5,
    "yes": True,
    "names": ["a", "", "ż"],
    "numbers": [1, -2, 3],
    "parts": [0.25, -1.5],
}


def refusal(file: Path) -> str:
    with pytest.raises(ValueError) as caught:
        read_header(file)
    said = str(caught.value)
    assert "\n" not in said
    return said


def test_everything_is_read_as_it_was_written(tmp_path: Path) -> None:
    header = read_header(write_gguf(tmp_path / "any.gguf", METADATA, {}))
    read = {
        key: value if isinstance(value, str | int | float) else list(value) for key, value in header.metadata.items()
    }
    assert {key: read[key] for key in METADATA} == METADATA


def test_tensors_lie_where_the_gguf_package_finds_them(tmp_path: Path) -> None:
    file = gguf_of("qwen3", tmp_path)
    found = {
        tensor.name: (tuple(reversed(tensor.shape)), tensor.tensor_type.value, tensor.data_offset)
        for tensor in GGUFReader(file).tensors
    }
    assert {
        name: (tensor.shape, tensor.type, tensor.start) for name, tensor in read_header(file).tensors.items()
    } == found


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not a GGUF file: it begins with b''"),
        (b'{"architectures": []}', "is not a GGUF file: it begins with b'{\"ar'"),
        (b"GGUF", "is not a whole GGUF file: its header does not end within 4 bytes"),
        (b"GGUF" + struct.pack("<I", 1), "is GGUF of version 1; only 2 and 3"),
        (b"GGUF" + struct.pack(">I", 3), "is GGUF of version 50331648; only 2 and 3, little-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "9223372036854775808 tensors are too many"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "9223372036854775808 metadata are too many"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**64 - 1), "its header does not end within 32 bytes"),
    ],
)
def test_what_is_no_gguf_is_refused(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    assert words in refusal(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (struct.pack("<IIQ", 9, 0, 2**40), "1099511627776 values of a list are too many"),
        (struct.pack("<IIQ", 9, 9, 1), "a value has the type 9"),
        (struct.pack("<IIQ", 9, 4, 2**20), "its header does not end"),
        (struct.pack("<I", 99), "a value has the type 99"),
        (struct.pack("<IQ2s", 8, 2, b"\xff\xfe"), "a text is not UTF-8"),
    ],
)
def test_a_value_that_lies_is_refused(value: bytes, words: str, tmp_path: Path) -> None:
    key = struct.pack("<Q3s", 3, b"key")
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + value)
    assert words in refusal(tmp_path / "model.gguf")


def test_any_cut_and_any_change_is_read_or_refused_on_one_line(tmp_path: Path) -> None:
    """In the header, where each byte counts."""
    whole = gguf_of("llama", tmp_path).read_bytes()
    chance, file = random.Random(1), tmp_path / "changed.gguf"
    start = min(tensor.start for tensor in read_header(tmp_path / "llama.gguf").tensors.values())
    for number in range(150):
        changed = bytearray(whole[: chance.randrange(start)] if number % 3 == 0 else whole)
        for _ in range(number % 3):
            place = chance.randrange(min(start, len(changed)))
            changed[place : place + 1] = chance.choice([b"\0", b"\xff", b"\x7f", chance.randbytes(1)])
        file.write_bytes(changed)
        said = refused(file, tmp_path / str(number))
        assert "\n" not in said
        assert number % 3 or "GGUF" in said


def refused(file: Path, folder: Path) -> str:
    try:
        folder_of(file, folder)
    except ValueError as error:
        return str(error)
    return ""


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "is neither a folder nor a regular file" in refusal(tmp_path / "pipe")
