"""Replicas in a TOML file that is watched for changes: one `[[replicas]]` for each."""

import asyncio
import logging
import re
import tomllib
from collections.abc import AsyncGenerator
from typing import Any

from router.discovery.wanted import Wanted
from router.spec import BadSpec, ReplicaSpec, spec_of
from router.watched_file import LOOK_INTERVAL_S, WatchedFile

log = logging.getLogger(__name__)

_TABLE = re.compile(r"^[ \t]*\[\[[ \t]*replicas[ \t]*\]\]", re.MULTILINE)


def parse_replicas(path: str, text: str) -> Wanted:
    """ValueError with file and line when any of it is wrong: half a list would drop replicas that are there."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    for key in content:
        if key != "replicas":
            raise ValueError(f"{path}: {key!r} is not known here; write one [[replicas]] for each replica")
    tables = content.get("replicas", [])
    if not isinstance(tables, list):
        raise ValueError(f"{path}: replicas is no list; write [[replicas]]")
    wanted: Wanted = {}
    for number, table in enumerate(tables):
        place = _place(path, text, number)
        spec = _spec(place, table)
        if spec.name in wanted:
            raise ValueError(f"{place}: there is a replica named {spec.name!r} above; give this one another name")
        wanted[spec.name] = spec
    return wanted


def _spec(place: str, table: Any) -> ReplicaSpec:
    if not isinstance(table, dict):
        raise ValueError(f"{place}: {table!r} is no table; write [[replicas]], and below it url = 'http://HOST:PORT'")
    try:
        return spec_of(table)
    except BadSpec as error:
        raise ValueError(f"{place}: {error}") from error


def _place(path: str, text: str, number: int) -> str:
    """The file, and the line of this `[[replicas]]`."""
    starts = [found.start() for found in _TABLE.finditer(text)]
    if number >= len(starts):  # written as a list of inline tables
        return f"{path}, replica {number + 1}"
    return f"{path}, line {text.count(chr(10), 0, starts[number]) + 1}"


class ReplicasFile:
    """While the file is broken or gone the last good list stays, and why is logged once."""

    def __init__(self, path: str, interval_s: float = LOOK_INTERVAL_S) -> None:
        self.where = path
        self.problem: str | None = None
        self._file = WatchedFile(path)
        self._interval_s = interval_s

    async def watch(self) -> AsyncGenerator[Wanted, None]:
        while True:
            wanted = self.look()
            if wanted is not None:
                yield wanted
            await asyncio.sleep(self._interval_s)

    def look(self) -> Wanted | None:
        """The list, if the file changed and is good."""
        try:
            text = self._file.read_if_changed()
            if text is None:
                return None
            wanted = parse_replicas(self.where, text)
        except ValueError as error:
            if self.problem != str(error):
                log.warning("%s; keeping the replicas it named before", error)
            self.problem = str(error)
            return None
        if self.problem is not None:
            log.info("%s can be read again", self.where)
        self.problem = None
        return wanted
