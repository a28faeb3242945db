"""`warmroute events tail`."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import click
from msgspec.structs import asdict
from rich.text import Text

from events.analysis.points import place_of
from events.cache.changes import Change, Stored
from events.messages import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch, Frames, Hash
from events.source import Source
from events.stream.actions import Action, Apply, Gap, Partial, Reset
from events.tool.options import StreamOptions, Target, for_option, json_option, open_targets, stream_options
from events.tool.output import Output, count, plain
from events.tool.streams import Stream, follow, played

SHOWN = {
    "BlockStored": ("stored", "green"),
    "BlockRemoved": ("removed", "yellow"),
    "AllBlocksCleared": ("cleared", "magenta"),
    "UnknownEvent": ("skipped", "bold red"),
    "RejectedEvent": ("unreadable", "bold red"),
    "exact": ("exact", "bold green"),
    "connected": ("connected", "blue"),
    "snapshot": ("snapshot", "blue"),
    "summary": ("summary", "bold"),
}
ALARM = "bold red"  # everything else: gaps, restarts, what was lost or could not be read


@click.command()
@click.argument("targets", nargs=-1, required=True, metavar="FILE|ENDPOINT...")
@stream_options
@for_option
@json_option
def tail(targets: tuple[str, ...], stream: StreamOptions, for_s: float | None, as_json: bool) -> None:
    """Show a stream live, one line per event, with a summary at the end.

    A line has the time, the batch's sequence number, what happened, the medium, how many blocks and tokens, the hash of
    the parent block and the key of the first block. Gaps, repairs, restarts and losses stand where they happen. With
    --replay, batches that the engine still has come first. A recording (FILE) is shown as it was recorded.

    \b
    Examples:
      warmroute events tail tcp://127.0.0.1:5557
      warmroute events tail tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558 --json | jq .blocks
      warmroute events tail tcp://10.0.0.5:5557 --topic kv@ --for 60
    """
    output = Output(as_json)
    opened = open_targets(targets, stream)
    several = sum(len(target.sources) for target in opened) > 1
    tails = [Tail(target, source, output, several) for target in opened for source in target.sources]
    if live := played(tails, output.note):

        def every() -> None:
            for tail in live:
                tail.say_if_exact()

        follow(live, limit_s=for_s, every=every, every_s=0.05)
    for one in tails:
        one.summarize()


class Tail(Stream):
    def __init__(self, target: Target, source: Source, output: Output, several: bool) -> None:
        super().__init__(target, source)
        self._output = output
        self._several = several
        self._came_by = ""
        self._keys: dict[int, int] = {}  # the key of each event's first block in the batch, by the event's id
        self._snapshot: list[int] = []  # blocks of each of its batches
        self._was_inexact: str | None = "not begun"

    def received(self, kind: str, frames: Frames) -> None:  # noqa: ARG002
        self.say_if_exact()
        self._came_by = kind
        if kind in ("connected", "disconnected"):
            self._line(kind, {"endpoint": self.source.events}, self.source.events)

    def summarize(self) -> None:
        self._end_of_snapshot()
        self.say_if_exact()
        stats, resolver = self.view.stream.stats, self.view.resolver
        own = {"resident_blocks": resolver.resident_blocks(), "orphan_blocks": resolver.orphan_blocks}
        fields = {**asdict(stats), **own, "inexact": self.view.inexact}
        text = (
            f"{count(stats.batches, 'batch')}, {count(resolver.resident_blocks(), 'block')} resident; "
            f"{count(stats.gaps, 'gap')}, {stats.lost_batches} of {stats.missing_batches} missing batches lost, "
            f"{count(stats.duplicates, 'duplicate')}, {count(stats.restarts, 'restart')}; "
            + (f"NOT EXACT: {self.view.inexact}" if self.view.inexact else "exact")
        )
        self._line("summary", fields, text)

    def acted(self, action: Action, batch: EventBatch | None, changes: Sequence[Change]) -> None:
        stored = (change for change in changes if isinstance(change, Stored) and change.chain)
        self._keys = {id(change.event): change.chain[0] for change in stored}
        if isinstance(action, Apply) and action.seq < 0:
            self._snapshot.append(
                sum(len(e.block_hashes) for e in batch.events if isinstance(e, BlockStored)) if batch else 0
            )
        else:
            self._end_of_snapshot()
        if isinstance(action, Apply) and action.seq >= 0 and batch is not None:
            for event in batch.events:
                self._event(action.seq, event)
        elif isinstance(action, Gap):
            one = action.first == action.last
            what = f"batch {action.first}" if one else f"batches {action.first} to {action.last}"
            self._line("gap", action._asdict(), f"{what} missing")
        elif isinstance(action, Reset | Partial):
            kind = "reset" if isinstance(action, Reset) else "partial"
            if action.reason != "snapshot":
                self._line(kind, {"reason": action.reason}, action.reason)
        self.say_if_exact()

    def say_if_exact(self) -> None:
        inexact = self.view.inexact
        if self._was_inexact is not None and inexact is None:
            last = self.view.stream.last_seq
            self._line("exact", {}, f"complete up to batch {last}" if last >= 0 else "complete, nothing published yet")
        self._was_inexact = inexact

    def _end_of_snapshot(self) -> None:
        if self._snapshot:
            batches, blocks = len(self._snapshot), sum(self._snapshot)
            self._snapshot = []
            text = f"{count(blocks, 'block')} in {count(batches, 'batch')}"
            self._line("snapshot", {"batches": batches, "blocks": blocks}, text)

    def _event(self, seq: int, event: Event) -> None:
        fields: dict[str, Any] = {"seq": seq, "by": self._came_by}
        parts = []
        if isinstance(event, BlockStored | BlockRemoved):
            blocks = len(event.block_hashes)
            fields |= {"medium": event.medium, "blocks": blocks, "group_idx": event.group_idx}
            fields |= {"locality": event.locality, "ownership": event.ownership}
            parts += [place_of(event) if event.medium else "-", f"{blocks:4} {'block ' if blocks == 1 else 'blocks'}"]
        if isinstance(event, BlockStored):
            key = self._keys.get(id(event))
            fields |= {"tokens": len(event.token_ids), "parent": event.parent_block_hash, "lora_name": event.lora_name}
            fields |= {"key": None if key is None else f"{key:016x}"}
            parts += [f"{len(event.token_ids):5} tokens", f"after {short(event.parent_block_hash):8}"]
            parts.append("no key yet" if key is None else f"key {key:016x}")
        elif not isinstance(event, BlockRemoved | AllBlocksCleared):
            fields["reason"] = getattr(event, "reason", None) or f"of unknown type {getattr(event, 'type_name', '')!r}"
            parts.append(fields["reason"])
        if self._came_by == "replay":
            parts.append("replayed")
        self._line(type(event).__name__, fields, "  ".join(parts), seq)

    def _line(self, kind: str, fields: Mapping[str, Any], text: str, seq: int | None = None) -> None:
        at_s = self.at_s if self.target.recording is not None else time.time()
        if self._output.json:
            self._output.line({"time": at_s, "source": self.source.name, "type": kind, **plain(fields)})
            return
        clock = time.strftime("%H:%M:%S", time.localtime(at_s)) + f".{int(at_s % 1 * 1000):03d}"
        line = Text(f"{clock}  ", style="dim")
        if self._several:
            line.append(f"{self.source.name}  ", style="cyan")
        line.append(f"{'' if seq is None else f'#{seq}':>8}  ", style="default")
        name, style = SHOWN.get(kind, (kind, ALARM))
        line.append(f"{name:12} ", style=style)
        line.append(text, style="default")
        self._output.show(line)


def short(block_hash: Hash | None) -> str:
    """The beginning of a hash, enough to tell one from another."""
    if block_hash is None:
        return "root"
    return block_hash.hex()[:8] if isinstance(block_hash, bytes) else f"{block_hash & (2**64 - 1):016x}"[:8]
