"""Reads files that somebody has named, such as those of a model's folder: regular ones, with a limit of their size."""

import json
import os
import stat
from pathlib import Path
from typing import Any

MAX_BYTES = 64 * 1024 * 1024  # the index of a large checkpoint has some 20 MB
MAX_TOKENIZER_BYTES = 256 * 1024 * 1024  # the largest in use have some 40 MB
MAX_TEMPLATE_BYTES = 1024 * 1024  # the largest in use have some 30 KB


def read_model_file(file: Path, most_bytes: int = MAX_BYTES) -> str:
    """Read a file, following links, as the hub's cache uses them. Raises ValueError if too large or not UTF-8."""
    return read_bytes_of(file, most_bytes).decode()


def read_object(file: Path) -> dict[str, Any]:
    """Read a file that must hold one JSON object. ValueError, with its name, for any other."""
    try:
        content = json.loads(read_model_file(file))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}; it must be an object")
    return content


def read_bytes_of(file: Path | str, most_bytes: int) -> bytes:
    """Read a file that is no text. A pipe would be waited for, and some devices have no end."""
    with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as opened:
        _check(file, os.fstat(opened.fileno()), most_bytes)
        content = opened.read(most_bytes + 1)  # it may be longer than it says, as those in /proc are
    if len(content) > most_bytes:
        raise _too_large(file, len(content), most_bytes)
    return content


def check_size(file: Path, most_bytes: int) -> None:
    """Refuse a file that is too large, or not a regular one: some have no end."""
    _check(file, file.stat(), most_bytes)


def _check(file: Path | str, found: os.stat_result, most_bytes: int) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise FileNotFoundError(f"{file} is not a regular file")
    if found.st_size > most_bytes:
        raise _too_large(file, found.st_size, most_bytes)


def _too_large(file: Path | str, size: int, most_bytes: int) -> ValueError:
    return ValueError(f"{file} has {size} bytes or more, but at most {most_bytes} are read; is it the right file?")
