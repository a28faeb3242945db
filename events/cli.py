"""`warmroute events`: the tools that read a replica's event stream. A new one is one line in COMMANDS."""

import click

from events.lazy import LazyGroup

COMMANDS = {
    "conform": ("events.tool.conform:conform", "Grade an engine's stream against the wire format, point by point."),
    "decode": ("events.tool.decode:decode", "Turn payloads (JSON lines of hex) into events with named fields."),
    "keygen": ("events.sockets.keygen:keygen", "Write a pair of CURVE keys, to encrypt streams and admit clients."),
    "mirror": ("events.tool.mirror:mirror", "Serve snapshots of an engine that has none, for its routers."),
    "record": ("events.tool.record:record", "Record streams to a file, with or without the prompts in them."),
    "replay": ("events.tool.replay:replay", "Publish a recording again, replay socket included."),
    "stat": ("events.tool.stat:stat", "Show rates, churn and losses of a stream."),
    "tail": ("events.tool.tail:tail", "Show a stream live, one line per event."),
    "tree": ("events.tool.tree:tree", "Draw the tree of cached prefixes."),
    "verify": ("events.tool.verify:verify", "Compare a stream's tree with the replica's own report of its cache."),
}


@click.group(cls=LazyGroup, table=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
def events() -> None:
    """Read, check, record and replay the cache events of replicas.

    FILE is a recording made by `record`; ENDPOINT is the socket of an engine's events, such as
    tcp://127.0.0.1:5557, or the http:// address of a warmroute replica, which reports all of its sockets. With
    --json the output is one JSON object per line.

    \b
    Examples:
      warmroute events tail tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558
      warmroute events tail http://127.0.0.1:8001
      warmroute events record tcp://127.0.0.1:5557 -o incident.wre
      warmroute events stat incident.wre
    """
