"""Sources of a model's files on this machine: a folder, or the demo model, which is made."""

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from replica.fetching.files import (
    LINK_TO_NOWHERE,
    TOKENIZER_FILES,
    File,
    Files,
    Record,
    described,
    reading,
    refuse_lost_shards,
    taken_bytes,
    total_bytes,
    wanted,
)
from replica.model import demo
from replica.model.locate import DEMO
from replica.model.progress import Progress, progress_of

CHUNK_BYTES = 8 << 20
LOOK_S = 0.5


class Source(ABC):
    name: str

    @abstractmethod
    def listing(self, known: Record | None) -> tuple[str, Files]:
        """A revision and its files; that which is known already, where the source has several."""

    def unchanged(self, record: Record) -> bool:  # noqa: ARG002
        """Return True if a folder with these files needs nothing, as far as can be told offline."""
        return True

    @abstractmethod
    def gather(self, revision: str, wanted: Files, into: Path) -> None:
        """Put the missing and incomplete ones there."""


class Demo(Source):
    """The demo model, made here; all but its weights lie in the package."""

    name = f"{DEMO}-{demo.VERSION}"

    def listing(self, known: Record | None) -> tuple[str, Files]:  # noqa: ARG002
        return "", {name: File(size_bytes) for name, size_bytes in demo.SIZES.items()}

    def gather(self, revision: str, wanted: Files, into: Path) -> None:  # noqa: ARG002
        if "model.safetensors" in wanted:
            demo.write_demo(into)
        else:
            demo.write_texts(into)


class Folder(Source):
    """A folder in Hugging Face's layout."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = str(folder.resolve())

    def listing(self, known: Record | None) -> tuple[str, Files]:  # noqa: ARG002
        with reading(self.folder):
            names = [path.name for path in self.folder.iterdir() if path.is_symlink() or path.is_file()]
            below = [name for name in TOKENIZER_FILES if "/" in name and (self.folder / name).is_file()]
        files = {}
        for name in sorted((*names, *below)):
            path = self.folder / name
            with reading(path):
                if not path.exists():
                    files[name] = LINK_TO_NOWHERE
                elif path.is_file():  # not what else a link may lead to
                    files[name] = described(path)
        return "", files

    def unchanged(self, record: Record) -> bool:
        _, files = self.listing(None)
        return wanted(self.name, files, record.tokenizer_only) == record.files

    def gather(self, revision: str, wanted: Files, into: Path) -> None:  # noqa: ARG002
        _, there = self.listing(None)
        refuse_lost_shards(self.name, self.folder, wanted, there)
        with progress_of(f"copying {self.folder.name}", total_bytes(wanted)) as progress:
            for name, file in wanted.items():
                for size_bytes in copied(self.folder / name, into / name, file):
                    progress.advance(size_bytes)


def copied(source: Path, target: Path, file: File) -> Iterator[int]:
    """Copies, unless that was done before, and yields how many bytes each part had."""
    if target.is_file() and described(target) == file:
        yield file.size_bytes
        return
    target.parent.mkdir(exist_ok=True)
    with target.open("wb") as writing:
        for part in parts(source):
            writing.write(part)
            yield len(part)
    with suppress(OSError):  # on a volume that keeps no times the next run copies it once more
        os.utime(target, (file.modified_s, file.modified_s))


def parts(source: Path) -> Iterator[bytes]:
    with reading(source), source.open("rb", buffering=0) as opened:
        while part := opened.read(CHUNK_BYTES):
            yield part


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
