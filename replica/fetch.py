"""The files of a model, put into a folder: each appears there whole, and the one that readers look for goes last.

What is fetched lies in `.warmroute` in that folder until all of it is there. Two records lie beside it: what belongs to
the folder, so that a second run needs neither the hub nor a folder that can be written to; and what has been begun, so
that a run after a crash goes on with the same files.
"""

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from api.settings import Unusable
from replica.model import demo
from replica.model.demo_tokenizer import learn
from replica.model.locate import DEMO, HUB_ID, NO_GGUF, UNWANTED, WANTED, local_folder
from replica.model.progress import progress_of, spoken_size

# What `api.tokenizer` reads, and with it a router.
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
# What other engines read beside it.
ALSO_WANTED = ["*.model", "*.tiktoken", "merges.txt"]
OWN = ".warmroute"
RECORD, BEGUN = "record.json", "begun.json"
INDEX = ".safetensors.index.json"
CHUNK_BYTES = 8 << 20
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # as some file systems of a network are

Say = Callable[[str], None]


class File(Struct, frozen=True):
    size_bytes: int
    modified_s: int = 0  # of a folder's files, which may change; 0: what it was read from stays as it is


Files = Mapping[str, File]  # by name, with / between folders
LINK_TO_NOWHERE = File(-1)


class Record(Struct, frozen=True):
    """What a folder is there for, or will be."""

    source: str
    revision: str
    tokenizer_only: bool
    files: dict[str, File]


class Index(Struct):
    """Which file each tensor is in."""

    weight_map: dict[str, str]


class Source(Protocol):
    name: str

    def listing(self, known: Record | None) -> tuple[str, Files]:
        """A revision and its files; that which is known already, where the source has several."""

    def unchanged(self, record: Record) -> bool:
        """Whether a folder with these files needs nothing, as far as can be said without asking anybody."""

    def gather(self, revision: str, wanted: Files, into: Path) -> None:
        """Puts them there, but for those that are there whole."""


class Failed(Exception):
    """Why a model could not be fetched, and the way out."""


def fetch_model(
    model: str, folder: Path, *, tokenizer_only: bool, revision: str | None, say: Say
) -> tuple[Record, bool]:
    """What the folder holds then, and whether it had to be fetched. Unusable or Failed if there is no way."""
    source = source_of(model, revision)
    if isinstance(source, Folder) and overlap(source.folder, folder):
        raise Unusable(f"{str(folder)!r} and {model!r} lie in each other; choose another folder to put the files into")
    with naming(folder):
        kept = holds(folder, source, tokenizer_only)
        if kept is not None:
            return kept, False
        refuse_others(folder, source.name)
        folder.mkdir(parents=True, exist_ok=True)
        with only_one(folder, say):
            refuse_others(folder, source.name)  # another one may have filled it meanwhile
            kept = holds(folder, source, tokenizer_only)
            return (kept, False) if kept is not None else (_fetched(source, folder, tokenizer_only, say), True)


def source_of(model: str, revision: str | None) -> Source:
    if model == DEMO:
        source: Source = Demo()
    elif (folder := _local_folder(model)) is not None:
        source = Folder(folder)
    elif HUB_ID.fullmatch(model):
        from replica.hub import Hub  # huggingface_hub: not needed for the others

        return Hub(model, revision)
    else:
        raise Unusable(f"{model!r} is no model; name a folder, a model of the hub such as ORG/NAME, or demo")
    if revision is not None:
        raise Unusable(f"{model!r} has no revisions, and --revision is {revision!r}; that is for models of the hub")
    return source


def _local_folder(model: str) -> Path | None:
    with reading(Path(model)):
        return local_folder(model)


def overlap(one: Path, other: Path) -> bool:
    one, other = one.resolve(), other.resolve()
    return one.is_relative_to(other) or other.is_relative_to(one)


@contextmanager
def naming(folder: Path) -> Iterator[None]:
    """An error of the file system that names no file is about the folder."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        where = f" ({error.filename})" if error.filename is not None else ""
        way_out = "name a folder that can be written to and has room"
        raise Failed(f"cannot put files into {str(folder)!r}: {reason}{where}; {way_out}") from error


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """An error of the file system here is about a file of the source."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise Failed(f"cannot read {str(file)!r}: {reason}; make it readable, or name another model") from error


# ---- what is there


def holds(folder: Path, source: Source, tokenizer_only: bool) -> Record | None:
    """The record of a folder that is complete for this."""
    record = recorded(folder)
    if record is None or record.source != source.name or (record.tokenizer_only and not tokenizer_only):
        return None
    return None if missing(folder, record.files) or not source.unchanged(record) else record


def recorded(folder: Path, name: str = RECORD) -> Record | None:
    try:
        return msgspec.json.decode((folder / OWN / name).read_bytes(), type=Record)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None


def missing(folder: Path, files: Files) -> dict[str, File]:
    """Those that are not there, or not whole."""
    there = {name: file for name, file in files.items() if _size_of(folder / name) == file.size_bytes}
    return {name: file for name, file in files.items() if name not in there}


def _size_of(file: Path) -> int | None:
    try:
        return file.stat().st_size if file.is_file() else None
    except OSError:
        return None


def refuse_others(folder: Path, source: str) -> None:
    """Files of two models in one folder would be taken for one."""
    record = recorded(folder)
    if record is not None and record.source != source:
        raise Failed(f"{str(folder)!r} holds {record.source}, not {source}; remove it, or name another folder")
    if folder.exists() and not folder.is_dir():
        raise Unusable(f"{str(folder)!r} is a file; name a folder")
    strange = sorted(file.name for file in folder.iterdir() if not _is_of_no_model(file)) if folder.is_dir() else []
    if record is None and strange:
        raise Failed(f"{str(folder)!r} holds {strange[0]!r} already, from elsewhere; name a folder that is empty")


def _is_of_no_model(file: Path) -> bool:
    """What volumes have from the beginning (`lost+found`, `..data`), and what we keep ourselves."""
    return file.name.startswith(".") or file.name == "lost+found"


@contextmanager
def only_one(folder: Path, say: Say) -> Iterator[None]:
    """Of several that are to fill one volume, one does and the others wait; when it is killed, the next goes on."""
    (folder / OWN).mkdir(exist_ok=True)
    with (folder / OWN / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process is filling {str(folder)!r}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise
            say(f"{str(folder)!r} is on a volume without locks ({error.strerror}); let one process alone fill it")
        yield


# ---- fetching


def _fetched(source: Source, folder: Path, tokenizer_only: bool, say: Say) -> Record:
    known, begun = recorded(folder), begun_before(folder, source.name)
    revision, offered = source.listing(known or begun)
    record = Record(source.name, revision, tokenizer_only, wanted(source.name, offered, tokenizer_only))
    if known is not None and any(offered.get(name) != file for name, file in known.files.items()):
        raise Failed(f"{str(folder)!r} holds {source.name} as it was before; remove it, or name another folder")
    lacking = missing(folder, record.files)
    gathered = folder / OWN / "files"
    refuse_full(folder, max(0, total_bytes(lacking) - taken_bytes(gathered)))
    say(f"fetching {source.name}: {amount(lacking)} into {str(folder)!r}")
    write_record(folder, record, BEGUN)
    gathered.mkdir(exist_ok=True)
    source.gather(revision, lacking, gathered)
    if cut := missing(gathered, lacking):
        raise Failed(f"{min(cut)!r} of {source.name} came incomplete; run the same command once more")
    refuse_lost_shards(source.name, gathered, lacking, record.files)
    write_record(folder, record)
    put(gathered, folder, in_order(lacking, tokenizer_only))
    shutil.rmtree(gathered, ignore_errors=True)
    (folder / OWN / BEGUN).unlink(missing_ok=True)
    return record


def begun_before(folder: Path, source: str) -> Record | None:
    """What a run that was killed had begun; of another model nothing is kept."""
    begun = recorded(folder, BEGUN)
    if begun is not None and begun.source == source:
        return begun
    shutil.rmtree(folder / OWN / "files", ignore_errors=True)
    return None


def wanted(model: str, offered: Files, tokenizer_only: bool) -> dict[str, File]:
    """What is to be fetched of it. Failed where a model would lack something then."""
    gguf = next((f", but {name}: {NO_GGUF}" for name in sorted(offered) if name.endswith(".gguf")), "")
    needed = "tokenizer.json" if tokenizer_only else "config.json"
    if needed not in offered:
        raise Failed(f"{model} has no {needed}{gguf}; name a model that has one")
    files = {name: file for name, file in offered.items() if _is_wanted(name, tokenizer_only)}
    if not tokenizer_only and not any(name.endswith(".safetensors") for name in files):
        raise Failed(f"{model} has no weights in safetensors{gguf}; add them, or take only its --tokenizer-only")
    if broken := [name for name, file in files.items() if file == LINK_TO_NOWHERE]:
        raise Failed(f"{model} has {min(broken)!r} as a link that leads nowhere; put the file there")
    return files


def _is_wanted(name: str, tokenizer_only: bool) -> bool:
    if name in TOKENIZER_FILES or tokenizer_only:
        return name in TOKENIZER_FILES
    matches = any(fnmatch(name, pattern) for pattern in (*WANTED, *ALSO_WANTED))
    return matches and not any(fnmatch(name, pattern) for pattern in UNWANTED)


def refuse_lost_shards(model: str, folder: Path, read: Files, there: Collection[str]) -> None:
    """Weights of which an index among `read` names more than is there."""
    for index in (name for name in read if name.endswith(INDEX)):
        lost = shards(folder / index).difference(there)
        if lost and index.removesuffix(".index.json") not in there:  # one whole file is read before any index
            raise Failed(f"{model} has no {min(lost)!r}, which its {index} names; get the rest of its weights")


def shards(index: Path) -> set[str]:
    try:
        with reading(index):
            return set(msgspec.json.decode(index.read_bytes(), type=Index).weight_map.values())
    except msgspec.DecodeError as error:
        raise Failed(f"{str(index)!r} is not the index of a checkpoint: {error}; get the file again") from error


def refuse_full(folder: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        room = f"{spoken_size(needed_bytes)} are needed, {spoken_size(free_bytes)} are free"
        raise Failed(f"{str(folder)!r} has no room: {room}; make room, or name another folder")


def taken_bytes(folder: Path) -> int:
    """What all that is below it takes on the disk."""
    return sum(_taken_bytes(file) for file in folder.rglob("*"))


def _taken_bytes(file: Path) -> int:
    """Files may be moved while we look, and sparse at first."""
    try:
        stat = file.stat()
    except FileNotFoundError:
        return 0
    return 0 if file.is_dir() else min(stat.st_size, stat.st_blocks * 512)


def total_bytes(files: Files) -> int:
    return sum(file.size_bytes for file in files.values())


def amount(files: Files) -> str:
    count = len(files)
    return f"{count} file{'' if count == 1 else 's'}, {spoken_size(total_bytes(files))}"


def write_record(folder: Path, record: Record, name: str = RECORD) -> None:
    unfinished = folder / OWN / "record.unfinished"
    unfinished.write_bytes(msgspec.json.encode(record))
    unfinished.replace(folder / OWN / name)


def in_order(names: Files, tokenizer_only: bool) -> list[str]:
    """Last comes what readers look for: a router for the tokenizer, a replica for the configuration."""
    last = "tokenizer.json" if tokenizer_only else "config.json"
    return sorted(names, key=lambda name: (name == last, name))


def put(gathered: Path, folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (gathered / name).replace(folder / name)


# ---- sources


class Demo:
    """The demo model, made here; its tokenizer needs nothing but Python."""

    name = f"{DEMO}-{demo.VERSION}"

    def listing(self, known: Record | None) -> tuple[str, Files]:  # noqa: ARG002
        return "", {name: File(size_bytes) for name, size_bytes in demo.SIZES.items()}

    def unchanged(self, record: Record) -> bool:  # noqa: ARG002
        return True

    def gather(self, revision: str, wanted: Files, into: Path) -> None:  # noqa: ARG002
        if "model.safetensors" in wanted:
            demo.write_demo(into)
        else:
            demo.write_texts(into, learn())


class Folder:
    """A folder in Hugging Face's layout."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = str(folder.resolve())

    def listing(self, known: Record | None) -> tuple[str, Files]:  # noqa: ARG002
        with reading(self.folder):
            names = [path.name for path in self.folder.iterdir() if path.is_symlink() or path.is_file()]
            below = [name for name in TOKENIZER_FILES if "/" in name and (self.folder / name).is_file()]
            files = {name: self._file(self.folder / name) for name in sorted((*names, *below))}
        return "", {name: file for name, file in files.items() if file is not None}

    def _file(self, path: Path) -> File | None:
        """None for what a link leads to that is no file."""
        with reading(path):
            if not path.exists():
                return LINK_TO_NOWHERE
            return described(path) if path.is_file() else None

    def unchanged(self, record: Record) -> bool:
        _, files = self.listing(None)
        return wanted(self.name, files, record.tokenizer_only) == record.files

    def gather(self, revision: str, wanted: Files, into: Path) -> None:  # noqa: ARG002
        _, there = self.listing(None)
        refuse_lost_shards(self.name, self.folder, wanted, there)
        progress = progress_of(f"copying {self.folder.name}", total_bytes(wanted))
        try:
            for name, file in wanted.items():
                for size_bytes in copied(self.folder / name, into / name, file):
                    progress.advance(size_bytes)
        except BaseException:
            progress.stop()
            raise
        progress.finish()


def described(path: Path) -> File:
    stat = path.stat()
    return File(stat.st_size, int(stat.st_mtime))


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


# ---- what is said


def summary(record: Record, folder: Path, fetched: bool, started_s: float) -> str:
    what = f"{str(folder)!r} holds {record.source}{f' at {record.revision}' if record.revision else ''}"
    how = f"fetched in {time.monotonic() - started_s:.1f} s" if fetched else "there already, nothing to do"
    return f"{what}: {amount(record.files)}; {how}"
