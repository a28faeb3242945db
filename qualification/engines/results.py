"""A file with the results of rows: a line of JSON for each."""

from pathlib import Path

import msgspec
from msgspec import Struct

from qualification.engines.judge import Tally


class Result(Struct):
    """A finished row."""

    row: str
    requests: int
    seed: int
    took_s: float
    tally: Tally


def kept(path: Path | None) -> dict[str, Result]:
    """The results in a file, by row."""
    if path is None or not path.exists():
        return {}
    lines = path.read_bytes().splitlines()
    return {result.row: result for result in (msgspec.json.decode(line, type=Result) for line in lines)}


def keep(path: Path | None, result: Result) -> None:
    """Add a result to a file."""
    if path is not None:
        with path.open("ab") as file:
            file.write(msgspec.json.encode(result) + b"\n")
