"""Reader of the golden vectors; nothing here may depend on their number or names."""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import pytest
from _pytest.mark import ParameterSet

from events.blocks import ExtraKey

Record: TypeAlias = dict[str, Any]
# Number of copies of each hash, by medium and group.
Copies: TypeAlias = dict[tuple[str, int], dict[int | bytes, int]]

VECTORS = Path(os.environ.get("WARMROUTE_VECTORS") or Path(__file__).parent.parent / "data" / "vectors")

# Positions of hashes, medium and group in array events, by type.
ARRAY_POSITIONS = {"BlockStored": (1, 6, 9), "BlockRemoved": (1, 2, 3)}


def files(pattern: str) -> list[Path]:
    return sorted(VECTORS.glob(pattern))


def read(path: Path) -> list[Record]:
    with path.open() as lines:
        return [json.loads(line) for line in lines if line.strip()]


def records(pattern: str) -> Iterator[Record]:
    for path in files(pattern):
        yield from read(path)


def params(named: Iterable[tuple[str, Any]]) -> list[ParameterSet]:
    """Test parameters with their names; none at all make pytest skip the test and say so."""
    return [pytest.param(value, id=name) for name, value in named]


def file_params(pattern: str) -> list[ParameterSet]:
    return params((path.stem, path) for path in files(pattern))


def unhex(value: Any) -> Any:
    """JSON's {"$hex": ...} as bytes, at any depth."""
    if isinstance(value, dict):
        return bytes.fromhex(value["$hex"]) if value.keys() == {"$hex"} else {k: unhex(v) for k, v in value.items()}
    return [unhex(item) for item in value] if isinstance(value, list) else value


def plain(value: Any) -> Any:
    """The JSON form of a decoded value: the inverse of `unhex`, with tuples as lists."""
    if isinstance(value, bytes):
        return {"$hex": value.hex()}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def exactly(value: Any) -> str:
    """A text that two values share only if they are equal and of the same types (1, 1.0 and true differ)."""
    return json.dumps(plain(value), sort_keys=True)


def own_extras(event_extra_keys: list[list[Any] | None] | None) -> dict[int, list[ExtraKey]]:
    """The multimodal and prompt-embed keys of each block, read from an event's `extra_keys` in the plainest way."""
    blocks: dict[int, list[ExtraKey]] = {}
    for index, parts in enumerate(unhex(event_extra_keys or [])):
        own = [tuple(part) if isinstance(part, list) else part for part in parts or [] if not isinstance(part, str)]
        if own:
            blocks[index] = own
    return blocks


def resident_copies(payloads: Iterable[bytes]) -> Copies:
    """A replica's cache after these payloads, by a model too simple to be wrong: +1 per store, -1 per removal."""
    pools: Copies = {}
    for payload in payloads:
        for event in msgspec.msgpack.decode(payload)[1]:
            kind, hashes, medium, group = _facts(event)
            if kind == "AllBlocksCleared":
                pools.clear()
            elif kind in ARRAY_POSITIONS:
                pool = pools.setdefault((medium or "GPU", group or 0), {})
                for block_hash in hashes:
                    pool[block_hash] = pool.get(block_hash, 0) + (1 if kind == "BlockStored" else -1)
                    if pool[block_hash] <= 0:
                        del pool[block_hash]
    return {name: pool for name, pool in pools.items() if pool}


def clears(payload: bytes) -> bool:
    """Return True if the batch clears the whole cache."""
    return any(_facts(event)[0] == "AllBlocksCleared" for event in msgspec.msgpack.decode(payload)[1])


def _facts(event: Any) -> tuple[str, list[int | bytes], str | None, int | None]:
    if isinstance(event, dict):
        return event["type"], event.get("block_hashes", []), event.get("medium"), event.get("group_idx")
    if event[0] not in ARRAY_POSITIONS:
        return event[0], [], None, None
    hashes, medium, group = (event[at] if at < len(event) else None for at in ARRAY_POSITIONS[event[0]])
    return event[0], hashes, medium, group  # type: ignore[return-value]
