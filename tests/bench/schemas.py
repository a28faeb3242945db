"""A thousand random schemas over HTTP, with and without a kill."""

import tempfile
import time
from pathlib import Path

from tests.chaos.schemas import TOGETHER, report

SCHEMAS = 1000


def run(rounds: int) -> None:
    del rounds  # one is long enough
    with tempfile.TemporaryDirectory() as folder:
        began_s = time.monotonic()
        found = report(Path(folder), SCHEMAS, TOGETHER)
    print(f"{found.answers:,} schemas, each answered twice: all valid, and the same with a kill as without")
    print(f"{found.tokens:,} events, {found.kills} kills, {found.resumed} answers went on elsewhere", end="; ")
    print(f"{time.monotonic() - began_s:.0f} s")
