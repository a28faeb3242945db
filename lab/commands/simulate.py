"""`warmroute simulate`: compare policies on a trace."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
import msgspec

from api.process.options import F, option
from api.process.settings import FiniteRange, Unusable
from fleet.display import progress
from lab.commands.common import check_options, counting, given_options
from lab.simulation import comparison
from lab.simulation.arena import tournament
from lab.simulation.arena.rules import RULES
from lab.simulation.comparison import BOUNDS, compared
from lab.simulation.settings import Settings
from lab.trace.formats import read_trace
from lab.trace.requests import at_rate, coarsened, sped_up, too_short
from router.placement.policy import POLICIES

USUAL = "round-robin,least-loaded,prefix,cost"
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
RATE = FiniteRange(min=1e-3, max=1e9)
COUNT = click.IntRange(1)
PACE = FiniteRange(min=1e-9, max=1e6)
SECONDS = FiniteRange(min=0, max=1e6)
EXCLUDES = [("speed", "load"), ("optimistic", "events"), ("speed", "arena"), ("no_bounds", "arena")]


def fleet_option(flag: str, metavar: str, help: str, field: str, kind: click.ParamType[Any]) -> Callable[[F], F]:
    """Make an option for a field of Settings; a default that changes nothing is not shown."""
    default = getattr(Settings(), field)
    return option(flag, metavar, help, name=field, type=kind, default=default, show_default=default > 1)


@click.command()
@option("--trace", "FILE", "The requests.", name="path", type=FILE)
@fleet_option("--replicas", "N", "How many.", "replicas", click.IntRange(1, 1024))
@fleet_option("--capacity-tokens", "C", "Tokens of KV cache in each (see warmroute size).", "capacity_tokens", COUNT)
@fleet_option("--prefill-rate", "R", "Tokens/s that a replica prefills.", "prefill_tokens_per_s", RATE)
@fleet_option("--decode-rate", "R", "Tokens/s of one answer.", "decode_tokens_per_s", RATE)
@option("--load", "RHO", "Change the pace: prompts arrive at RHO x N x R tokens/s, cached or not.", type=PACE)
@option("--speed", "X", "Change the pace: X times as fast as the trace.", type=PACE)
@option("--policy", "P,...", f"Of {', '.join((*POLICIES, *RULES))}.  [default: {USUAL}]")
@click.option("--arena", is_flag=True, help="Other projects' policies, too, for 4, 8 and 16 replicas at three loads.")
@option("--coarsen", "K", "Blocks K times as large.", show_default=False, type=COUNT, default=1)
@option("--block-tokens", "N", "Block size of the trace, if the file does not have it.", type=COUNT)
@option("--jitter", "S", "Delay each arrival by up to S seconds.", show_default=False, type=SECONDS, default=0.0)
@option("--seeds", "K", "Runs, each with its own chance.", show_default=False, type=click.IntRange(1, 1000), default=1)
@click.option("--closed-loop", is_flag=True, help="A session's turn comes when the last has ended and its gap is over.")
@click.option("--no-working-set", "working_set", flag_value=False, default=True, help="Sessions begin at once.")
@click.option("--no-events", "events", flag_value=False, default=True, help="Replicas send no events.")
@click.option("--no-optimistic", "optimistic", flag_value=False, default=True, help="Only what events say is cached.")
@click.option("--no-bounds", is_flag=True, help="Leave out the bounds that no policy can beat.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def simulate(
    path: Path | None,
    load: float | None,
    speed: float | None,
    policy: str | None,
    arena: bool,
    coarsen: int,
    block_tokens: int | None,
    jitter: float,
    seeds: int,
    no_bounds: bool,
    as_json: bool,
    **fleet: Any,
) -> None:
    """Compare policies on a trace: hit rate and time to first token, in virtual time.

    The router's index, policies and optimistic entries and the engine's block pool are the shipped ones; only time is
    simulated. A replica prefills one request at a time, uncached tokens / R, and requests that decode hold their
    blocks for output tokens / decode rate.

    The trace is JSON lines, plain or gzipped: Mooncake's (timestamp, input_length, output_length, hash_ids or
    hash_runs), or a request log (warmroute router --request-log).

    \b
    hits      1 - tokens computed / tokens of all prompts
    tokens    computed by the busiest replica, as a multiple of the mean; same for requests
    busy      share of time spent on computing prompts
    pooled    one cache as large as all together, one queue, N prefills at once
    ideal     the same with an unlimited cache

    With --arena each line sums up fleets and loads: shares by arithmetic means, times by geometric ones.

    \b
    closed    share of the way from round-robin's mean to that of pooled; at least: where it is smallest
    ahead     fleets and loads where the mean is lower than that of cost

    \b
    Examples:
      warmroute simulate --trace conversation.jsonl --replicas 8 --load 0.9
      warmroute simulate --trace requests.log --policy cost,prefix --jitter 0.3 --seeds 4
      warmroute simulate --trace conversation.jsonl --arena
    """
    policies = tuple(dict.fromkeys((policy or USUAL).split(",")))
    known = *POLICIES, *RULES
    for name in policies:
        if name not in known:
            raise Unusable(f"--policy: {name!r} is not one of {', '.join(known)}; name one of them")
    if path is None:
        raise Unusable("give --trace FILE")
    check_options({}, EXCLUDES)
    settings = Settings(**fleet)
    with progress("reading", path.stat().st_size) as tell:
        trace = coarsened(read_trace(path, block_tokens, tell), coarsen)
    if settings.closed_loop and all(request.session is None for request in trace.requests):
        raise Unusable(f"--closed-loop needs sessions, and no request of {path} names one; leave it out")
    try:
        settings.check(trace)
    except ValueError as error:
        raise Unusable(f"--capacity-tokens: {error}") from error
    if (why := too_short(trace)) is not None:
        click.echo(f"Note: {why}", err=True)
    repeats: dict[str, Any] = {"seeds": seeds, "jitter_s": jitter}
    if arena:
        sizes = [settings.replicas] if "replicas" in given_options() else tournament.REPLICAS
        loads = tournament.LOADS if load is None else [load]
        runs = tournament.runs_of(sizes, loads, policies if policy else tournament.POLICIES)
        with progress("simulating", len(runs)) as tell:
            found = tournament.outcomes(trace, settings, runs, tell, **repeats)
        results = trace, settings, found, tournament.standings(found, settings.closed_loop)
        show(as_json, tournament.as_json(*results), tournament.lines(*results))
        return
    if load is not None:
        trace = at_rate(trace, load * settings.replicas * settings.prefill_tokens_per_s)
    elif speed is not None:
        trace = sped_up(trace, speed)
    simulations = seeds * (len(policies) + (0 if no_bounds else len(BOUNDS)))
    with counting("simulating", simulations * len(trace.requests)) as on_request:
        rows = compared(trace, settings, policies, bounds=not no_bounds, on_request=on_request, **repeats)
    show(as_json, comparison.as_json(trace, settings, rows), comparison.lines(trace, settings, rows))


def show(as_json: bool, answer: dict[str, Any], lines: Iterable[str]) -> None:
    click.echo(msgspec.json.encode(answer) if as_json else "\n".join(lines))
