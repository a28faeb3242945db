"""The files of a model: which are required, which are there, and the records of both."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path

import msgspec
from msgspec import Struct

from replica.model.locate import UNWANTED, WANTED
from replica.model.progress import Progress, spoken_size

# `api.tokens.tokenizer` reads these, and with it a router.
TOKENIZER_FILES = (
    "additional_chat_templates/tool_use.jinja",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
# Other engines read these beside it.
ALSO_WANTED = ["*.model", "*.tiktoken", "merges.txt"]
OWN = ".warmroute"
RECORD, BEGUN = "record.json", "begun.json"
LOOK_S = 0.5
GGUF = "model.gguf"


class File(Struct, frozen=True):
    size_bytes: int


Files = Mapping[str, File]  # files by name, with / between folders
MADE = File(-2)  # `gather` makes it: its size is known afterwards


class Record(Struct, frozen=True):
    source: str
    revision: str
    tokenizer_only: bool
    files: dict[str, File]


class FetchFailed(ValueError):
    """A model could not be fetched; the message names the way out."""


class Source(ABC):
    """A place from which a model's files come."""

    name: str

    @abstractmethod
    def listing(self, known: Record | None) -> tuple[str, Files]:
        """A revision and its files; that which is known already, where the source has several."""

    @abstractmethod
    def gather(self, revision: str, wanted: Files, into: Path) -> None:
        """Put the missing and incomplete ones there."""


# ---- files on disk


def recorded(folder: Path, name: str = RECORD) -> Record | None:
    try:
        return msgspec.json.decode((folder / OWN / name).read_bytes(), type=Record)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None


def write_record(folder: Path, record: Record, name: str = RECORD) -> None:
    unfinished = folder / OWN / "record.unfinished"
    unfinished.write_bytes(msgspec.json.encode(record))
    unfinished.replace(folder / OWN / name)


def missing(folder: Path, files: Files) -> dict[str, File]:
    found = {}
    for name in files:
        with suppress(OSError):
            if (folder / name).is_file():
                found[name] = (folder / name).stat().st_size
    return {name: file for name, file in files.items() if found.get(name) != file.size_bytes}


def taken_bytes(folder: Path) -> int:
    """Return the bytes that everything below the path takes on the disk."""
    taken = 0
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError):  # files may be moved while we look, and sparse at first
            if not file.is_dir():
                taken += min(file.stat().st_size, file.stat().st_blocks * 512)
    return taken


# ---- files to fetch


def wanted(model: str, offered: Files, tokenizer_only: bool) -> dict[str, File]:
    """Return the files to fetch; raise FetchFailed if the model would still lack some."""
    gguf = next((f", but {name}: name that file as --model" for name in sorted(offered) if name.endswith(".gguf")), "")
    needed = "tokenizer.json" if tokenizer_only else "config.json"
    if needed not in offered:
        raise FetchFailed(f"{model} has no {needed}{gguf}; name a model that has one")
    patterns, files = () if tokenizer_only else (GGUF, *WANTED, *ALSO_WANTED), {}
    for name, file in offered.items():
        matches = any(fnmatch(name, one) for one in patterns) and not any(fnmatch(name, one) for one in UNWANTED)
        if matches or name in TOKENIZER_FILES:
            files[name] = file
    if not tokenizer_only and not any(name == GGUF or name.endswith(".safetensors") for name in files):
        raise FetchFailed(f"{model} has no weights in safetensors{gguf}; add them, or take only its --tokenizer-only")
    return files


def in_order(names: Files, tokenizer_only: bool) -> list[str]:
    """Last comes what readers look for: a router for the tokenizer, a replica for the configuration."""
    last = "tokenizer.json" if tokenizer_only else "config.json"
    return sorted(names, key=lambda name: (name == last, name))


def total_bytes(files: Files) -> int:
    return sum(file.size_bytes for file in files.values())


def amount(files: Files) -> str:
    count = len(files)
    return f"{count} file{'' if count == 1 else 's'}, {spoken_size(total_bytes(files))}"


@contextmanager
def watched(folder: Path, progress: Progress, most_bytes: int) -> Iterator[None]:
    """Show meanwhile how the folder grows."""
    over = threading.Event()

    def watch() -> None:
        seen_bytes = 0
        while not over.wait(LOOK_S):
            now_bytes = min(taken_bytes(folder), most_bytes)
            progress.advance(now_bytes - seen_bytes)
            seen_bytes = now_bytes

    thread = threading.Thread(target=watch)
    thread.start()
    with progress:
        try:
            yield
        finally:
            over.set()
            thread.join()
