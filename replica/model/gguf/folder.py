"""A folder in the user's cache that makes a GGUF file a model in Hugging Face's layout."""

import os
import tempfile
from pathlib import Path

from xxhash import xxh3_64_hexdigest

from replica.model.demo import CACHE_VARIABLE, cache_folder
from replica.model.gguf.texts import write_texts

VERSION = 1  # raise it when the texts that are made of the same file change


def gguf_folder(file: Path) -> Path:
    """Its texts and a link to it, made once for each state of the file. ValueError for a file that cannot run here."""
    whole, found = file.resolve(), file.stat()
    state = xxh3_64_hexdigest(os.fsencode(f"{VERSION} {found.st_size} {found.st_mtime_ns} {whole}"))
    folder = cache_folder() / "gguf" / f"{file.stem[:100]}-{state}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not folder.is_dir():
            # Under another name first, so that nobody reads half of it.
            with tempfile.TemporaryDirectory(prefix=".", dir=folder.parent) as beside:
                unfinished = Path(beside) / folder.name
                unfinished.mkdir()
                write_texts(whole, unfinished)
                (unfinished / "model.gguf").symlink_to(whole)
                try:
                    unfinished.rename(folder)
                except OSError:
                    if not folder.is_dir():  # another process was faster
                        raise
    except OSError as error:
        reason = f"the tokenizer of {file} cannot be written to {folder.parent}: {error}"
        raise OSError(f"{reason}; set {CACHE_VARIABLE} to a folder that can be written to") from error
    return folder
