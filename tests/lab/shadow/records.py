"""Records of requests that nobody has sent."""

from array import array
from collections.abc import Sequence
from typing import Any

from lab.shadow.placing import AtOnce, Record

BLOCK = 16


def record(keys: Sequence[int] = (1,), **more: Any) -> Record:
    fields: dict[str, Any] = {
        "ts": 0.0,
        "request_id": "r",
        "model": "m",
        "tokens": BLOCK * len(keys) + 1,
        "block_tokens": BLOCK,
        "exact": True,
    }
    return Record(**(fields | more), keys=array("Q", keys))


def seen(replica: str | None, hits: dict[str, float], chosen: str, **more: Any) -> Record:
    return record(replica=replica, at_once=AtOnce(chosen, hits), **more)
