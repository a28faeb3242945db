"""`warmroute events mirror`: an engine's cache, published again as our own replicas publish theirs.

From here on the engine's blocks are named by their keys, once for all readers: there are no copies, orphans or tokens,
and a snapshot is a set of blocks (docs/decisions/0107-a-mirror-publishes-block-keys.md).
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby

import click
import zmq
from msgspec.structs import replace
from rich.live import Live

from events.cache.changes import Change, Cleared, Removed, Stored
from events.cache.extras import has_pairs, lookahead_of
from events.cache.groups import MAX_KNOWN, Said, said_of
from events.messages import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, Frames, Hash, KnownEvent
from events.native import Doubt, Load
from events.publisher import Publisher, PublisherConfig, offset_port
from events.sockets.curve import load_curve
from events.source import Source
from events.stream.actions import Action, Reset
from events.tool.options import StreamOptions, Target, checked_endpoint, json_option, open_target, stream_options
from events.tool.output import Output, count
from events.tool.streams import Following, Stream

SOCKETS = ("events", "replay", "status", "snapshot")
STATUS_EVERY_S = 0.25
READ_ANEW_PAUSE_S = 30.0  # between two full reads of one rank
NOT_YET = "the mirror has not read the engine's events yet"
STOOD_STILL = "the mirror stood still: events of that time have not been read"


@click.command()
@click.argument("target", metavar="ENDPOINT")
@click.option("--bind", required=True, metavar="ENDPOINT", help="Where to publish events; the other sockets follow.")
@click.option("--ranks", type=click.IntRange(1, 256), default=1, metavar="N", help="The engine's data-parallel ranks.")
@click.option("--secret", metavar="FILE", help="The mirror's own secret CURVE key, to encrypt its sockets.")
@click.option("--clients", metavar="DIR", help="The public keys of the routers it lets in.")
@stream_options
@json_option
def mirror(
    target: str, bind: str, ranks: int, secret: str | None, clients: str | None, stream: StreamOptions, as_json: bool
) -> None:
    """Serve snapshots of an engine that has none, such as vLLM or SGLang, for its routers.

    Start it before the engine, anywhere near. Routers that follow it in place of the engine's own sockets are exact
    within a second, whenever they start and whatever they lose. It prints the sockets that a router has to be given
    beside the engine's URL. With --ranks, each socket has as many ports, and so has the engine. It sends keys of blocks
    and no tokens. The --model is part of every key: name it as the engine's /v1/models does.

    A mirror that came late or has lost events for good says so, and no router calls its predictions exact until the
    engine restarts or clears its cache, or, with vLLM, until its whole pool has turned over.

    \b
    Examples:
      warmroute events mirror tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558 --model qwen --bind tcp://*:7557
      warmroute router --replica url=http://10.0.0.1:8000,events=tcp://10.0.0.1:7557,replay=tcp://10.0.0.1:7558,\\
        status=tcp://10.0.0.1:7559,snapshot=tcp://10.0.0.1:7560
    """
    output, opened = Output(as_json), open_target(target, stream)
    [source, *_] = opened.sources
    if opened.recording is not None or source.native:
        raise click.UsageError(f"{target} has snapshots, or is a recording; a mirror follows engines without them")
    if not stream.model:
        raise click.UsageError("--model is missing; write the first name that the engine's /v1/models answers")
    checked_endpoint(bind, "--bind", bind=True)
    try:
        keys = None if secret is None else load_curve(secret, clients)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    config = PublisherConfig(model=stream.model, curve=keys, doubt=Doubt(NOT_YET))
    reflections: list[Reflection] = []
    with ExitStack() as stack:
        for rank in range(ranks):
            own = {name: offset_port(end, rank) for name in SOCKETS[:2] if (end := getattr(source, name))}
            ends = {name: offset_port(bind, kind * ranks + rank) for kind, name in enumerate(SOCKETS)}
            try:
                publisher = stack.enter_context(Publisher(replace(config, **ends)))
            except zmq.ZMQError as error:
                raise click.ClickException(f"--bind {bind}: {error}") from error
            reflections.append(Reflection(opened, replace(source, name=f"rank {rank}", **own), publisher))
            bound = {name: getattr(publisher.endpoints, name) for name in SOCKETS}
            if as_json:
                output.line({"kind": "bound", "rank": rank, **bound})
            else:
                output.note(f"rank {rank}: {','.join(f'{name}={end}' for name, end in bound.items())}")
        live = stack.enter_context(Live(console=output.notes, transient=True, auto_refresh=False))
        asyncio.run(reflect(reflections, output, live))


class Reflection(Stream):
    """One rank's stream, published again."""

    def __init__(self, target: Target, source: Source, publisher: Publisher) -> None:
        super().__init__(target, source)
        self.publisher = publisher
        self.doubt = NOT_YET  # readers were told this one last
        self.may_read_s = 0.0
        self._words: dict[Said, BlockStored] = {}  # readers that come late learn the engine's groups from them

    def acted(self, action: Action, batch: EventBatch | None, changes: Sequence[Change]) -> None:
        if isinstance(action, Reset):
            self._words.clear()
        events: list[KnownEvent] = []
        for event in batch.events if batch is not None else ():
            if isinstance(event, BlockStored) and said_of(event) not in self._words and len(self._words) < MAX_KNOWN:
                events.append(self._words.setdefault(said_of(event), word(event)))
        for change in changes:
            if isinstance(change, Cleared):
                events = [AllBlocksCleared(), *self._words.values()]
            elif isinstance(change, Removed):
                events.append(BlockRemoved([*change.keys], change.medium, change.group or None))
            elif isinstance(change, Stored):
                events += named(change)
        if self.view.inexact is not None:  # before what may be wrong, and after what makes it right
            self.look()
        self.publisher.publish(events)
        self.look()

    def received(self, kind: str, frames: Frames) -> None:  # noqa: ARG002
        if kind == "disconnected":
            asyncio.get_running_loop().call_soon(self.look)

    def look(self) -> None:
        """Tell readers at once whether what they have is still sure."""
        if self.doubt != (self.view.inexact or ""):
            self.report(self.view.inexact)

    def report(self, doubt: str | None) -> None:
        stream, resolver, self.doubt = self.view.stream, self.view.resolver, doubt or ""
        is_lost = doubt == stream.partial and stream.delay is None
        provable = is_lost and resolver.doubtful.is_of_one_group(resolver.pools)
        self.publisher.report(Load(), Doubt(self.doubt, provable))


def bare(event: BlockStored, keys: list[Hash], parent: int | None) -> BlockStored:
    kind, window = event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window
    own = event.block_size, None, event.medium, None, None, event.group_idx
    return BlockStored(keys, parent, [], *own, kind, window)


def word(event: BlockStored) -> BlockStored:
    """The event without its blocks: it tells of its group alone."""
    ahead = [[0] * lookahead_of(event)] if event.lookahead_token_ids else None
    return replace(bare(event, [], None), token_ids=[(0, 0)] if has_pairs(event) else [], lookahead_token_ids=ahead)


def named(stored: Stored) -> Iterator[BlockStored]:
    """The blocks that are new in their pool, named by their keys, with the key before as their parent."""
    new = set(stored.keys)
    links = zip([stored.parent_key, *stored.chain], stored.chain, strict=False)
    for is_new, run in groupby(links, key=lambda link: link[1] in new):
        if is_new:
            parents, keys = zip(*run, strict=True)
            yield bare(stored.event, list(keys), parents[0])


async def reflect(reflections: Sequence[Reflection], output: Output, live: Live) -> None:
    told: dict[int, str] = {}

    def every() -> None:
        for rank, each in enumerate(reflections):
            if each.publisher.failed is not None:
                raise click.ClickException(f"{each.source.name}: publishing has ended: {each.publisher.failed}")
            each.report(STOOD_STILL if followed.stands_still else each.view.inexact)
            now_s = asyncio.get_running_loop().time()
            if (outgrown := each.view.resolver.outgrown) is not None and now_s >= each.may_read_s:
                each.may_read_s = now_s + READ_ANEW_PAUSE_S
                followed.resync(each.source.name, outgrown)
            if told.get(rank) != each.doubt:
                told[rank] = each.doubt
                state = {"kind": "state", "rank": rank, "sure": not each.doubt, "doubt": each.doubt}
                output.line(state) if output.json else output.note(f"{each.source.name}: {each.doubt or 'sure'}")
        blocks = [count(each.view.resolver.resident_blocks(), "block") for each in reflections]
        live.update(", ".join(blocks), refresh=True)

    async with Following(every, STATUS_EVERY_S) as followed:
        for each in reflections:
            followed.follow(each)
        await followed.until(lambda: False)
