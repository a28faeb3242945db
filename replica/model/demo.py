"""The demo model: a small Llama that was never trained, made on first use, the same to the bit on every machine.

It babbles. Its texts lie in `demo_files`, the tokenizer learnt from demo.txt among them; `demo_weights` makes the rest.
Raise VERSION and correct SIZES when any of them changes, because a folder that is whole is never made again.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

VERSION = 1
CACHE_VARIABLE = "WARMROUTE_CACHE_DIR"
TEXTS = Path(__file__).with_name("demo_files")
SIZES = {"model.safetensors": 12_028_992} | {file.name: file.stat().st_size for file in TEXTS.iterdir()}


def demo_folder() -> Path:
    """The folder of the demo model, in Hugging Face's layout; made if it is not there yet."""
    return made_once(cache_folder() / f"demo-{VERSION}", write_demo, "the demo model")


def made_once(folder: Path, make: Callable[[Path], None], what: str) -> Path:
    """Return the folder; if it is not there, `make` fills one beside it, so that nobody sees half of it."""
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=folder.parent) as beside:
            made = Path(beside) / folder.name
            made.mkdir()
            make(made)
            try:
                made.rename(folder)
            except OSError:
                if not folder.is_dir():  # another process was faster
                    raise
    except OSError as error:
        reason = f"{what} cannot be written to {folder.parent}: {error}"
        raise OSError(f"{reason}; set {CACHE_VARIABLE} to a folder that can be written to") from error
    return folder


def cache_folder() -> Path:
    """The folder of what can be made again: chosen by the user, or in the user's cache."""
    chosen = os.environ.get(CACHE_VARIABLE)
    folder = chosen or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "warmroute")
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:  # an unknown user, or no HOME
        raise ValueError(f"{folder!r} has no home folder; set {CACHE_VARIABLE} to an absolute path") from error


def write_demo(folder: Path) -> None:
    from replica.model.demo_weights import write_weights  # numpy: not needed for the rest

    write_weights(folder / "model.safetensors")
    write_texts(folder)


def write_texts(folder: Path) -> None:
    """All but the weights."""
    for file in TEXTS.iterdir():
        shutil.copyfile(file, folder / file.name)
