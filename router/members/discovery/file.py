"""Replicas from a TOML file, watched for changes: one `[[replicas]]` table each."""

import asyncio
import logging
import re
import tomllib
from collections.abc import AsyncGenerator

from router.members.discovery.desired import Desired, Discovery
from router.members.spec import BadSpec, spec_of
from router.members.watched_file import LOOK_INTERVAL_S, WatchedFile

log = logging.getLogger(__name__)

_TABLE = re.compile(r"^[ \t]*\[\[[ \t]*replicas[ \t]*\]\]", re.MULTILINE)


def parse_replicas(path: str, text: str) -> Desired:
    """Parse the whole file; raise ValueError with file and line: half a list would drop existing replicas."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    for key in content:
        if key != "replicas":
            raise ValueError(f"{path}: {key!r} is not known here; write one [[replicas]] for each replica")
    tables = content.get("replicas", [])
    if not isinstance(tables, list):
        raise ValueError(f"{path}: replicas is not a list; write [[replicas]]")
    desired: Desired = {}
    starts = [found.start() for found in _TABLE.finditer(text)]
    for number, table in enumerate(tables):
        place = f"{path}, replica {number + 1}"
        if number < len(starts):  # else it is one of a list of inline tables
            place = f"{path}, line {text.count(chr(10), 0, starts[number]) + 1}"
        if not isinstance(table, dict):
            raise ValueError(
                f"{place}: {table!r} is not a table; write [[replicas]], and below it url = 'http://HOST:PORT'"
            )
        try:
            spec = spec_of(table)
        except BadSpec as error:
            raise ValueError(f"{place}: {error}") from error
        if spec.name in desired:
            raise ValueError(f"{place}: another replica is named {spec.name!r}; choose another name")
        desired[spec.name] = spec
    return desired


class FileDiscovery(Discovery):
    """Each distinct problem of the file is logged once."""

    def __init__(self, path: str, interval_s: float = LOOK_INTERVAL_S) -> None:
        super().__init__(path)
        self._file = WatchedFile(path)
        self._interval_s = interval_s

    async def watch(self) -> AsyncGenerator[Desired, None]:
        while True:
            desired = self.read_if_changed()
            if desired is not None:
                yield desired
            await asyncio.sleep(self._interval_s)

    def read_if_changed(self) -> Desired | None:
        """The replicas, if the file changed and is valid."""
        try:
            text = self._file.read_if_changed()
            if text is None:
                return None
            desired = parse_replicas(self.where, text)
        except ValueError as error:
            if self._problem != str(error):
                log.warning("%s; keeping what it named before", error)
            self._problem = str(error)
            return None
        self._recovered()
        return desired
