import json
import os
import time
from pathlib import Path

import pytest

from replica.model.demo import CACHE_VARIABLE
from replica.model.weights_digest import PIECE_BYTES, READ_BYTES, SETTLED_NS, weights_digest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "weights"


def later_ns() -> int:
    return time.time_ns() + 2 * SETTLED_NS


def single(folder: Path, content: bytes = b"weights") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)
    return folder


def linked(folder: Path, content: bytes = b"weights") -> Path:
    """A GGUF file that lies elsewhere."""
    folder.mkdir()
    file = folder.with_suffix(".gguf")
    file.write_bytes(content)
    (folder / "model.gguf").symlink_to(file)
    return folder


def sharded(folder: Path, *contents: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    names = [f"model-{number}.safetensors" for number, _ in enumerate(contents)]
    for name, content in zip(names, contents, strict=True):
        (folder / name).write_bytes(content)
    index = {"weight_map": {f"tensor.{name}": name for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_the_same_bytes_have_the_same_digest_anywhere(tmp_path: Path) -> None:
    for here, there in (
        (single(tmp_path / "here"), single(tmp_path / "there")),
        (sharded(tmp_path / "a", b"x", b"y"), sharded(tmp_path / "b", b"x", b"y")),
        (linked(tmp_path / "near"), linked(tmp_path / "far")),
    ):
        os.utime(there, (5, 5))
        assert weights_digest(here) == weights_digest(there)


def test_other_weights_have_another_digest(tmp_path: Path) -> None:
    digests = {
        weights_digest(folder)
        for folder in (
            single(tmp_path / "1", b"weights"),
            single(tmp_path / "2", b"Weights"),
            single(tmp_path / "3", b""),
            sharded(tmp_path / "4", b"x", b"y"),
            sharded(tmp_path / "5", b"y", b"x"),
            sharded(tmp_path / "6", b"xy", b""),
            sharded(tmp_path / "7", b"x", b"y", b""),
            linked(tmp_path / "8", b"weights"),
            linked(tmp_path / "9", b"Weights"),
        )
    }
    assert len(digests) == 9


def test_every_byte_of_a_large_file_counts(tmp_path: Path) -> None:
    size = PIECE_BYTES + 100
    folder = single(tmp_path / "model", b"")
    os.truncate(folder / "model.safetensors", size)
    digests = {weights_digest(folder)}
    for place in (READ_BYTES, PIECE_BYTES, size - 1):
        with (folder / "model.safetensors").open("r+b") as file:
            file.seek(place)
            file.write(b"x")
        digests.add(weights_digest(folder))
    assert len(digests) == 4


# ---- the cache


def entries(cache: Path) -> list[Path]:
    return list(cache.iterdir()) if cache.exists() else []


def test_a_second_start_takes_the_digest_from_the_cache(tmp_path: Path, cache: Path) -> None:
    folder = sharded(tmp_path / "model", b"x", b"y")
    weights_digest(folder, later_ns)
    [entry] = entries(cache)
    known = json.loads(entry.read_text())
    assert list(known) == ["model-0.safetensors", "model-1.safetensors"]
    known["model-1.safetensors"][1] = known["model-0.safetensors"][1]  # as if both were the same
    entry.write_text(json.dumps(known))
    assert weights_digest(folder) == weights_digest(sharded(tmp_path / "other", b"x", b"x"))


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"a": 1}', b"\xff" * 100, b"[" * 100_000, b"null"])
def test_a_damaged_cache_costs_only_time(tmp_path: Path, cache: Path, content: bytes) -> None:
    folder = single(tmp_path / "model")
    digest = weights_digest(folder, later_ns)
    [entry] = entries(cache)
    whole = entry.read_bytes()
    entry.write_bytes(content)
    assert weights_digest(folder, later_ns) == digest
    assert entry.read_bytes() == whole
