"""The command `warmroute bench`."""

import resource
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec
from click.core import ParameterSource
from msgspec import Struct

from api.process.options import option
from api.process.settings import ABOVE_0, AT_LEAST_0, Unusable
from fleet.commands.addresses.address import Address
from fleet.commands.addresses.local_routers import locate_router, router_argument
from lab.bench.load import Limits
from lab.bench.measure import Plan, measured, outcomes_of, summed_up
from lab.bench.probe import RequestSettings, target_of
from lab.bench.report import Live, lines
from lab.bench.result import WithRequests, row
from lab.bench.workloads import WORKLOADS, Arrival, arriving, at_once, conversations, limited, replayed
from lab.commands.common import check_options
from lab.trace.formats import read_trace
from lab.trace.requests import Trace
from lab.trace.shaping import sped_up
from lab.writing import new_file, write_whole
from router.process.setting_types import SECRET
from router.tenants.admission import is_loopback

AT_LEAST_1 = click.IntRange(min=1)
KINDS = click.Choice(list(WORKLOADS))
USUAL_S = 20.0
USUAL_ROUNDS = 3
USUAL_CLIENTS = 8
INTERRUPTED = 130
FILES_BESIDE = 64  # that are open beside the connections


class BenchOptions(Struct, kw_only=True, frozen=True):
    url: str
    model: str | None
    workload: str | None
    trace: str | None
    requests: int | None
    for_s: float | None
    rate: float | None
    concurrency: int | None
    speed: float | None
    warm_up: int
    seed: int
    max_tokens: int | None
    think_s: float | None
    api: str
    block_tokens: int | None
    timeout_s: float
    against: str | None
    rounds: int | None


@click.command()
@router_argument
@option("--model", "NAME", "The model.  [default: the only one that is served]")
@option("--workload", "NAME", f"The kind of traffic: {', '.join(WORKLOADS)}.  [default: chatbot]", type=KINDS)
@option("--trace", "FILE", "Replay a trace or a router's request log, at its times.")
@option(
    "--for",
    "SECONDS",
    f"Send no new requests after this time.  [default: {USUAL_S:g}; all of a trace]",
    name="for_s",
    type=ABOVE_0,
)
@option("--requests", "N", "Stop after so many requests, instead of a time or as well.", type=AT_LEAST_1)
@option("--rate", "R", "Open loop: requests a second at random, answered or not.", type=ABOVE_0)
@option(
    "--concurrency",
    "C",
    f"Closed loop: clients that each wait for an answer.  [default: {USUAL_CLIENTS}]",
    type=AT_LEAST_1,
)
@option("--speed", "X", "Replay a trace X times as fast.  [default: 1]", type=ABOVE_0)
@option("--warm-up", "N", "The first requests, which are not counted.", type=click.IntRange(min=0), default=0)
@option("--seed", "K", "Equal seeds send equal requests.", type=int, default=0)
@option("--max-tokens", "N", "Ask for answers of this length.  [default: as planned]", type=AT_LEAST_1)
@option("--think", "SECONDS", "Between turns of multi-turn, on average.  [default: 2]", name="think_s", type=AT_LEAST_0)
@option(
    "--api",
    "NAME",
    "chat: messages; completions: one text.",
    default="chat",
    type=click.Choice(["chat", "completions"]),
)
@option("--block-tokens", "N", "Block size of a trace, if the file does not have it.", type=AT_LEAST_1)
@option("--timeout", "SECONDS", "Time limit of a whole answer.", name="timeout_s", type=ABOVE_0, default=600.0)
@option(
    "--api-key",
    "KEY",
    "Send this key. Better given as OPENAI_API_KEY: other users can see the command line.",
    type=SECRET,
    envvar="OPENAI_API_KEY",
)
@option("--against", "ADDRESS", "Compare: send the same lengths to this endpoint, in turn.", type=Address())
@option("--rounds", "N", f"Rounds of the comparison.  [default: {USUAL_ROUNDS}]", type=AT_LEAST_1)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, in seconds and tokens.")
@option(
    "--output",
    "FILE",
    "Write the JSON there, with a row for every request.",
    type=click.Path(path_type=Path),
    callback=new_file,
)
def bench(which: str | None, api_key: str | None, as_json: bool, output: Path | None, **given: Any) -> int:
    """Send requests to an endpoint of the OpenAI API as users would, and measure its latencies.

    ROUTER is the one on this machine if it is not given. It may also be a replica of warmroute, vLLM, SGLang, or any
    other endpoint that streams, with or without /v1. --seed determines all requests. With --rate they are sent at their
    times, whether earlier ones are answered or not (open loop), and latencies count from then; with --concurrency each
    client waits for its answer (closed loop).

    \b
    Examples:
      warmroute bench --for 20
      warmroute bench 8000 --workload multi-turn --rate 20 --for 60 --warm-up 200
      warmroute bench 10.0.0.1:8000 --trace log.jsonl.gz --speed 2
      warmroute bench 10.0.0.1:8000 --against 10.0.0.2:8000 --rate 10

    Ctrl-C shows the results so far, and writes no file. Exit status: 0 measured, 1 the endpoint cannot be asked, no
    request was answered or a file cannot be written, 2 a value cannot be used, 130 ended by Ctrl-C.
    """
    exclusive = (("workload", "trace"), ("rate", "trace"), ("rate", "concurrency"), ("speed", "concurrency"))
    check_options({"speed": "trace", "block_tokens": "trace", "rounds": "against"}, exclusive)
    asked = BenchOptions(url=locate_router(which), **given)
    if asked.think_s is not None and asked.workload != "multi-turn":
        raise Unusable("--think has no effect without --workload multi-turn; give both, or leave it out")
    plan = _plan(asked, api_key)
    away = " and ".join(target.url for target in plan.targets if not is_loopback(target.host))
    if away and click.get_current_context().get_parameter_source("api_key") is ParameterSource.ENVIRONMENT:
        click.echo(f"OPENAI_API_KEY from the environment is sent to {away}; unset it to send no key", err=True)
    allow_files(asked.concurrency)
    with Live(plan.rounds) as live:
        found = measured(plan, live.load)
    settings = {name: value for name, value in msgspec.structs.asdict(asked).items() if value not in (None, False)}
    result = summed_up(plan, found, settings)
    click.echo(msgspec.json.encode(result).decode() if as_json else "\n".join(lines(result)))
    if found.interrupted:
        return INTERRUPTED
    outcomes = outcomes_of(found)
    if output is not None:
        rows = [row(which, number, outcome) for which, number, outcome in outcomes]
        write_whole(output, msgspec.json.encode(WithRequests(result, rows)) + b"\n")
    return 0 if all(endpoint.figures.requests > endpoint.figures.failed for endpoint in result.endpoints) else 1


def _plan(asked: BenchOptions, key: str | None) -> Plan:
    targets = [target_of(url) for url in (asked.url, asked.against) if url]
    try:
        trace = None if asked.trace is None else read_trace(Path(asked.trace), asked.block_tokens)
    except OSError as error:
        raise Unusable(f"--trace: cannot read {asked.trace!r}: {error.strerror or error}") from error
    return Plan(
        targets=targets,
        wish=RequestSettings(asked.model, str(asked.seed), asked.api == "chat"),
        arrivals=partial(_arrivals, asked, None if trace is None else sped_up(trace, asked.speed or 1.0)),
        limits=_limits(asked, trace),
        rounds=(asked.rounds or USUAL_ROUNDS) if asked.against else 1,
        key=key,
        timeout_s=asked.timeout_s,
    )


def _limits(asked: BenchOptions, trace: Trace | None) -> Limits:
    warm_up, requests, for_s = asked.warm_up, asked.requests, asked.for_s
    if trace is not None and warm_up >= len(trace.requests):
        raise Unusable(
            f"--warm-up {warm_up:,} leaves none of the {len(trace.requests):,} requests to count in "
            f"{asked.trace!r}; give less"
        )
    if requests is None and for_s is None:
        if trace is None:
            for_s = USUAL_S
        else:
            requests = len(trace.requests) - warm_up
    is_open = asked.rate is not None or (trace is not None and asked.concurrency is None)
    return Limits(requests, for_s, warm_up, None if is_open else asked.concurrency or USUAL_CLIENTS)


def _arrivals(asked: BenchOptions, trace: Trace | None, seed: str) -> Iterator[Arrival]:
    if trace is not None:
        return limited(replayed(trace), asked.max_tokens)
    think_s = {} if asked.think_s is None else {"think_s": asked.think_s}
    talks = conversations(asked.workload or "chatbot", seed, **think_s)
    return limited(at_once(talks) if asked.rate is None else arriving(talks, asked.rate, seed), asked.max_tokens)


def allow_files(clients: int | None) -> None:
    """Each connection is an open file: as many as the system lets this process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if clients is not None and hard != resource.RLIM_INFINITY and clients + FILES_BESIDE > hard:
        raise Unusable(
            f"--concurrency {clients} needs as many open files, but the limit is {hard:,} (it was {soft:,}); "
            "raise `ulimit -Hn`, or use fewer"
        )
