"""A digest of all bytes of a model's weights, the same on every machine, and computed once for each state of the files.

Digests of files are kept in the user's cache folder. An entry that is lost, torn or foreign costs only time.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct
from xxhash import xxh3_128, xxh3_128_hexdigest

from api.model_files import read_object
from replica.model.config import ModelConfig
from replica.model.demo import cache_folder
from replica.model.progress import progress_of
from replica.model.weights import GGUF_FILE, INDEX_FILE, SINGLE_FILE

log = logging.getLogger(__name__)

PIECE_BYTES = 64 * 2**20  # changes every digest
READ_BYTES = 2**20
THREADS = 4  # a disk reads faster with several requests under way
SETTLED_NS = 2 * 10**9  # a file that was just written or changed may change once more without a new time
MAX_CACHE_BYTES = 16 * 2**20


class FileDigest(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A file's digest, and the size, times, inode and device by which the file is known to be unchanged."""

    stamp: tuple[int, int, int, int, int]
    digest: str


_decode_cache = msgspec.json.Decoder(dict[str, FileDigest]).decode


def weights_digest(folder: Path, clock_ns: Callable[[], int] = time.time_ns) -> str:
    """Digest the files of the weights and their names. OSError or ValueError for what cannot be read."""
    names = _weight_files(folder)
    cache, known = None, dict[str, FileDigest]()
    with suppress(ValueError):  # the user has no cache folder
        cache = cache_folder() / "weights" / f"{xxh3_128_hexdigest(os.fsencode(folder.resolve()))}.json"
        with suppress(OSError, msgspec.DecodeError, RecursionError), cache.open("rb") as opened:
            known = _decode_cache(opened.read(MAX_CACHE_BYTES))
    digests = {
        name: known[name] for name in names if name in known and known[name].stamp == _stamp((folder / name).stat())
    }
    if missing := [name for name in names if name not in digests]:
        digests |= dict(zip(missing, _compute(folder, missing), strict=True))
        settled = {name: digest for name, digest in digests.items() if max(digest.stamp[1:3]) < clock_ns() - SETTLED_NS}
        if cache is not None and settled:
            _write_cache(cache, settled)
    return xxh3_128_hexdigest(msgspec.json.encode([(name, digests[name].digest) for name in names]))


def _weight_files(folder: Path) -> list[str]:
    """The names of the files that `replica.model.weights` reads."""
    if (folder / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    index = folder / INDEX_FILE
    if not index.is_file() and (folder / GGUF_FILE).is_file():
        return [GGUF_FILE]
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not places or any(Path(str(name)).name != name for name in places.values()):
        raise ValueError(f"{index} is not the index of a checkpoint; get the file again")
    return sorted(set(places.values()))


# ---- compute


def _compute(folder: Path, names: Sequence[str]) -> Iterator[FileDigest]:
    stamps = [_stamp((folder / name).stat()) for name in names]
    what, size = f"reading {folder.name} to tell its weights apart", sum(size for size, *_ in stamps)
    with progress_of(what, size) as progress, ThreadPoolExecutor(THREADS) as threads:
        for name, stamp in zip(names, stamps, strict=True):
            pieces = xxh3_128()
            starts = range(0, stamp[0], PIECE_BYTES)
            for start, piece in zip(starts, threads.map(partial(_digest_piece, folder / name), starts), strict=True):
                pieces.update(piece)
                progress.advance(min(PIECE_BYTES, stamp[0] - start))
            if _stamp((folder / name).stat()) != stamp:
                raise ValueError(f"{folder / name} changed while it was read; start again when it is whole")
            yield FileDigest(stamp, pieces.hexdigest())


def _digest_piece(file: Path, start: int) -> bytes:
    digest, stop = xxh3_128(), start + PIECE_BYTES
    buffer = memoryview(bytearray(READ_BYTES))
    with file.open("rb", buffering=0) as opened:
        while count := os.preadv(opened.fileno(), [buffer[: stop - start]], start):
            digest.update(buffer[:count])
            start += count
    return digest.digest()


def _stamp(found: os.stat_result) -> tuple[int, int, int, int, int]:
    """The time of the last change of the inode, too: a copy can keep a file's own time."""
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev


def _write_cache(file: Path, digests: dict[str, FileDigest]) -> None:
    """Write under another name first, so that nobody reads half of it."""
    unfinished = file.with_name(f"{file.name}-{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(msgspec.json.encode(digests))
        unfinished.replace(file)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        log.info("the digest of the weights is not kept, and computed at each start: %s", error)


VERSION = 1  # raise it when the same weights and tokens give other bytes of a block


def kv_layout(config: ModelConfig, *, dtype: str, block_size: int, model: str, folder: Path, arrangement: str) -> str:
    """32 hexadecimal digits that are equal only if a block's key and bytes mean the same, on any machine.

    `model` is the name in block keys, `folder` has the weights, and `arrangement` names the order of a block's bytes.
    """
    parts = (VERSION, model, dtype, block_size, arrangement, config, weights_digest(folder))
    return xxh3_128_hexdigest(msgspec.json.encode(parts))
