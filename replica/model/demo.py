"""The demo model: a small Llama that was never trained, made on first use, the same to the bit on every machine.

It babbles. Its texts lie in `demo_files`, the tokenizer learnt from demo.txt among them; `demo_weights` makes the rest.
Raise VERSION and correct SIZES when any of them changes, because a folder that is whole is never made again.
"""

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

VERSION = 1
CACHE_VARIABLE = "WARMROUTE_CACHE_DIR"
TEXTS = Path(__file__).with_name("demo_files")
SIZES = {"model.safetensors": 12_028_992} | {file.name: file.stat().st_size for file in TEXTS.iterdir()}
ABANDONED_AFTER_S = 3600.0  # making it takes seconds


def demo_folder() -> Path:
    """The folder of the demo model, in Hugging Face's layout; made if it is not there yet, or not whole."""
    folder = cache_folder() / f"demo-{VERSION}"
    # Names and sizes are compared: reading it all would take as long as making it.
    files = {name: folder / name for name in SIZES}
    if all(file.is_file() and file.stat().st_size == SIZES[name] for name, file in files.items()):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Remove the folders of makers that were killed.
        for unfinished in folder.parent.glob(".demo-*"):
            with contextlib.suppress(FileNotFoundError):  # another one removes it too
                if time.time() - unfinished.stat().st_mtime > ABANDONED_AFTER_S:
                    shutil.rmtree(unfinished, ignore_errors=True)
        # Write under another name first, so that a half-written file is never visible.
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as beside:
            made = Path(beside) / folder.name
            made.mkdir()
            write_demo(made)
            try:
                made.rename(folder)
            except OSError:
                if not folder.is_dir():
                    raise
                # It is damaged, or of another one who was faster: each file takes the place of an equal one.
                for file in made.iterdir():
                    file.replace(folder / file.name)
    except OSError as error:
        reason = f"the demo model cannot be written to {folder.parent}: {error}"
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
