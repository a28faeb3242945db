"""The demo model: a small Llama that was never trained, made on first use, the same to the bit on every machine.

It babbles. Its files come from `demo_shape`, `demo_tokenizer` and `demo_weights`: raise VERSION and correct SIZES when
any of them changes, because a folder that is whole is never made again.
"""

import contextlib
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

from replica.model.demo_shape import config
from replica.model.demo_tokenizer import TURN_END, Learnt, learn, packaged, tokenizer, tokenizer_config

VERSION = 1
CACHE_VARIABLE = "WARMROUTE_CACHE_DIR"
SIZES = {
    "chat_template.jinja": 950,
    "config.json": 538,
    "generation_config.json": 26,
    "model.safetensors": 12_028_992,
    "tokenizer.json": 52_819,
    "tokenizer_config.json": 176,
}
ABANDONED_AFTER_S = 3600.0  # making it takes seconds


def demo_folder() -> Path:
    """The folder of the demo model, in Hugging Face's layout; made if it is not there yet, or not whole."""
    folder = _cache_folder() / f"demo-{VERSION}"
    if _is_whole(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder.parent)
        _made_beside(folder)
    except OSError as error:
        reason = f"the demo model cannot be written to {folder.parent}: {error}"
        raise OSError(f"{reason}; set {CACHE_VARIABLE} to a folder that can be written to") from error
    return folder


def _cache_folder() -> Path:
    chosen = os.environ.get(CACHE_VARIABLE)
    folder = chosen or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "warmroute")
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:  # an unknown user, or no HOME
        raise ValueError(f"{folder!r} begins with no home folder; set {CACHE_VARIABLE} to a whole path") from error


def _is_whole(folder: Path) -> bool:
    """By names and sizes: reading it all would take as long as making it."""
    files = {name: folder / name for name in SIZES}
    return all(file.is_file() and file.stat().st_size == SIZES[name] for name, file in files.items())


def _remove_abandoned(cache: Path) -> None:
    """Remove the folders of makers that were killed."""
    for unfinished in cache.glob(".demo-*"):
        with contextlib.suppress(FileNotFoundError):  # another one removes it too
            if time.time() - unfinished.stat().st_mtime > ABANDONED_AFTER_S:
                shutil.rmtree(unfinished, ignore_errors=True)


def _made_beside(folder: Path) -> None:
    """Under another name first, so that nobody ever sees half of it."""
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        write_demo(unfinished)
        unfinished.chmod(0o755)  # mkdtemp's folders are for their owner alone
        _put(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _put(made: Path, folder: Path) -> None:
    """In a folder that is there, damaged or of another who was faster, each file takes the place of an equal one."""
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        for file in made.iterdir():
            file.replace(folder / file.name)


def write_demo(folder: Path) -> None:
    """All files of the model."""
    from replica.model.demo_weights import write_weights  # numpy: not needed for the rest

    learnt = learn()
    write_weights(folder / "model.safetensors", learnt)
    write_texts(folder, learnt)


def write_texts(folder: Path, learnt: Learnt) -> None:
    """All but the weights."""
    turn_end = learnt.ids[TURN_END]
    _write_json(folder / "tokenizer.json", tokenizer(learnt.vocabulary, learnt.merges))
    _write_json(folder / "tokenizer_config.json", tokenizer_config())
    _write_json(folder / "config.json", config(len(learnt.vocabulary), turn_end))
    _write_json(folder / "generation_config.json", {"eos_token_id": turn_end})
    (folder / "chat_template.jinja").write_text(packaged("demo.jinja"), encoding="utf-8")


def _write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
