"""`warmroute events demo`."""

import random
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator

import click
import zmq

from events.blocks import block_keys, pack_tokens, root_key
from events.messages import BlockRemoved, BlockStored, Hash, KnownEvent
from events.native import Load
from events.publisher import Publisher, PublisherConfig
from events.subscriber import Source
from events.tool.options import Target, for_option, json_option
from events.tool.output import Output
from events.tool.tail import Tail, watch

BLOCK_SIZE = 16
CACHE_BLOCKS = 400
STATUS_EVERY_S = 0.25
TENANTS = {"docs": 192, "shop": 96, "chat": 32}  # tokens of the system prompt that a tenant's conversations share


@click.command()
@click.option("--rate", type=click.FloatRange(min=0.1), default=2.0, show_default=True, help="Requests a second.")
@for_option
@json_option
def demo(rate: float, for_s: float | None, as_json: bool) -> None:
    """Publish the events of a made-up replica on loopback, and show them as `tail` does.

    Three tenants, each with a system prompt of its own, hold conversations of several turns over a small cache that
    forgets what was used least recently. Try the other tools on it, in another terminal.

    \b
    Examples:
      warmroute events demo
      warmroute events demo --rate 20 --for 10
    """
    output = Output(as_json)
    with _publisher() as publisher:
        ends = publisher.endpoints
        native = f"{ends.events} --replay {ends.replay} --status {ends.status} --snapshot {ends.snapshot}"
        output.note(f"In another terminal:\n  warmroute events tree {native}\n  warmroute events stat {native}\n")
        target = Target("demo", [Source("demo", ends.events, ends.replay, ends.status, ends.snapshot, model="demo")])
        end = threading.Event()
        engine = threading.Thread(target=_serve, args=(publisher, rate, end))
        engine.start()
        try:
            tail = Tail(target, target.sources[0], output, several=False)
            watch([tail], for_s)
            tail.summarize()
        finally:
            end.set()
            engine.join()


def _publisher() -> Publisher:
    """On the usual ports, or on free ones where those are taken."""
    try:
        return Publisher(PublisherConfig(topic="kv@demo@demo", model="demo"))
    except zmq.ZMQError:
        free = "tcp://127.0.0.1:0"
        return Publisher(PublisherConfig(free, free, free, free, topic="kv@demo@demo", model="demo"))


def _serve(publisher: Publisher, rate: float, end: threading.Event) -> None:
    cache: OrderedDict[Hash, None] = OrderedDict()
    prompts = _prompts(random.Random(0))
    due = time.monotonic() + 1 / rate
    while not end.wait(min(STATUS_EVERY_S, max(0.0, due - time.monotonic()))):
        if time.monotonic() >= due:
            due += 1 / rate
            publisher.publish(_admit(cache, next(prompts)))
        publisher.report(Load(running=1, cached_blocks=len(cache), free_blocks=CACHE_BLOCKS - len(cache)))


def _admit(cache: OrderedDict[Hash, None], tokens: list[int]) -> list[KnownEvent]:
    """What an engine with this cache says when it has computed the prompt: leaves go first when room is needed."""
    keys: list[Hash] = [*block_keys(pack_tokens(tokens), BLOCK_SIZE, root_key("demo", None, None, BLOCK_SIZE))]
    known = next((index for index, key in enumerate(keys) if key not in cache), len(keys))
    events: list[KnownEvent] = []
    if known < len(keys):
        parent = keys[known - 1] if known else None
        new = tokens[known * BLOCK_SIZE : len(keys) * BLOCK_SIZE]
        events.append(BlockStored(keys[known:], parent, new, BLOCK_SIZE, None, "GPU", None))
    for key in reversed(keys):
        cache[key] = None
        cache.move_to_end(key)
    evicted: list[Hash] = [cache.popitem(last=False)[0] for _ in range(len(cache) - CACHE_BLOCKS)]
    return [*events, BlockRemoved(evicted, "GPU")] if evicted else events


def _prompts(rng: random.Random) -> Iterator[list[int]]:
    """Conversations that grow by a turn at a time, several of them open at once."""
    systems = [[rng.randrange(32_000) for _ in range(length)] for length in TENANTS.values()]
    talks = [list(rng.choice(systems)) for _ in range(6)]
    while True:
        index = rng.randrange(len(talks))
        talks[index] += [rng.randrange(32_000) for _ in range(rng.randrange(20, 120))]
        yield list(talks[index])
        if rng.random() < 0.2:
            talks[index] = list(rng.choice(systems))
