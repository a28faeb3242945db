"""`warmroute events diff`: what two replicas, or two moments of one, share and what only one has."""

import click

from events.analysis.compare import compare
from events.analysis.tree import Tree
from events.tool.comparison import show_comparison
from events.tool.options import (
    Moment,
    MomentType,
    StreamOptions,
    json_option,
    open_targets,
    stream_options,
    timeout_option,
    tokenizer_option,
)
from events.tool.output import Output
from events.tool.streams import Watch, load
from events.tool.words import Decode

PARTS = 10
EQUAL, DIFFERENT = 0, 1


@click.command()
@click.argument("left", metavar="A")
@click.argument("right", metavar="B")
@stream_options
@click.option("--at-a", type=MomentType(), help="The moment of A: 1234 (a batch), +12.5 (seconds) or an ISO time.")
@click.option("--at-b", type=MomentType(), help="The moment of B.")
@click.option("--replica-a", metavar="NAME", help="Which replica of A, if it holds several.")
@click.option("--replica-b", metavar="NAME", help="Which replica of B.")
@click.option("--top", default=PARTS, show_default=True, metavar="N", help="How many differing parts to list; 0: all.")
@tokenizer_option
@timeout_option
@json_option
def diff(
    left: str,
    right: str,
    stream: StreamOptions,
    at_a: Moment | None,
    at_b: Moment | None,
    replica_a: str | None,
    replica_b: str | None,
    top: int,
    decode: Decode | None,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Compare two replicas, or one at two moments: list the blocks that only one side has.

    A and B are recordings or endpoints; the same recording twice, with --at-a and --at-b, compares two moments. Blocks
    are compared by the keys of their content, so the engines' hashes, seeds and versions may differ. Listed are the
    topmost blocks of the parts that only one side has, the largest first. With two endpoints, give --replay and the
    like once for each, A first. Exit status: 0 if both hold the same, 1 if not, 2 if unknown.

    \b
    Examples:
      warmroute events diff monday.wre tuesday.wre
      warmroute events diff incident.wre incident.wre --at-a +10 --at-b +20
      warmroute events diff tcp://10.0.0.7:5557 tcp://10.0.0.8:5557 \\
          --replay tcp://10.0.0.7:5558 --replay tcp://10.0.0.8:5558
    """
    output = Output(as_json)
    opened = open_targets([left, right], stream)
    tree = Tree()
    sides = [
        Watch(opened[0], opened[0].chosen(replica_a, "--replica-a"), name="A", tree=tree),
        Watch(opened[1], opened[1].chosen(replica_b, "--replica-b"), name="B", tree=tree),
    ]
    load(sides, timeout_s, output.note, [at_a, at_b])
    for side in sides:
        if side.view.inexact is not None:
            output.note(f"{side.view.name} ({side.target.name}) is inexact: {side.view.inexact}")
    found = compare(tree, "A", "B")
    show_comparison(output, found, {"A": opened[0].name, "B": opened[1].name}, decode, top)
    click.get_current_context().exit(EQUAL if found.equal else DIFFERENT)
