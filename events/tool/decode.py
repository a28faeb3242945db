"""`warmroute events decode`."""

import sys
from collections import Counter
from typing import Any, BinaryIO

import click
import msgspec
from msgspec import Struct

from events.messages import BlockRemoved, BlockStored, Decoder, Event, RejectedEvent, UnknownEvent
from events.tool.output import plain, to_json


class Line(Struct):
    payload_hex: str


@click.command()
@click.argument("file", type=click.File("rb"), default="-")
def decode(file: BinaryIO) -> None:
    """Turn payloads into events: JSON lines of {"payload_hex": ...} in, one JSON object per line out.

    Every event has all named fields, absent ones null; bytes are written {"$hex": ...}. Reads what any vLLM since 0.9,
    SGLang and TensorRT-LLM send. A line that cannot be read is reported on stderr with its number and reason, an event
    of a known type that cannot be read as well (the batch's other events are printed); both make the exit status 1.
    Events of an unknown type are left out and counted on stderr.

    \b
    Examples:
      warmroute events decode < payloads.jsonl > events.jsonl
      echo '{"payload_hex": "93cb41daac505d90000090c0"}' | warmroute events decode
    """
    unknown: Counter[str] = Counter()
    bad = 0

    def complain(number: int, reason: str) -> None:
        nonlocal bad
        bad += 1
        click.echo(f"line {number}: {reason}", err=True)

    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            batch = Decoder().decode(bytes.fromhex(msgspec.json.decode(line, type=Line).payload_hex), "")
        except (msgspec.DecodeError, ValueError) as error:  # BadBatch is one of the latter
            complain(number, str(error).removeprefix(": "))
            continue
        events = []
        for event in batch.events:
            if isinstance(event, RejectedEvent):
                complain(number, f"an event was left out: {event.reason}")
            elif isinstance(event, UnknownEvent):
                unknown[event.type_name] += 1
            else:
                events.append(named(event))
        sys.stdout.write(to_json({"ts": batch.ts, "data_parallel_rank": batch.data_parallel_rank, "events": events}))
        sys.stdout.write("\n")
        sys.stdout.flush()
    for name, times in sorted(unknown.items()):
        click.echo(f"events of the unknown type {name!r} left out: {times}", err=True)
    click.get_current_context().exit(1 if bad else 0)


def named(event: Event) -> dict[str, Any]:
    kind = BlockStored if isinstance(event, BlockStored) else BlockRemoved if isinstance(event, BlockRemoved) else None
    fields = kind.__struct_fields__ if kind is not None else ()
    return {"type": type(event).__name__, **{field: plain(getattr(event, field)) for field in fields}}
