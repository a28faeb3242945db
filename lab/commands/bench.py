"""The command `warmroute bench`."""

import resource
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
from click.core import ParameterSource

from api.process.options import option
from api.process.settings import ABOVE_0, AT_LEAST_0, Unusable
from fleet.commands.addresses.local_routers import locate_router, router_argument
from fleet.display import progress
from lab.bench.load import Limits
from lab.bench.measure import Plan, measured, summed_up
from lab.bench.probe import RequestSettings, target_of
from lab.bench.report import lines
from lab.bench.workloads import WORKLOADS, Arrival, arriving, at_once, conversations, limited, replayed
from lab.commands.common import check_options, given_options
from lab.trace.formats import read_trace
from lab.trace.requests import sped_up
from router.process.setting_types import SECRET
from router.tenants.admission import is_loopback

AT_LEAST_1 = click.IntRange(min=1)
KINDS, APIS = click.Choice(list(WORKLOADS)), click.Choice(["chat", "completions"])
USUAL_S = 20.0
USUAL_CLIENTS = 8
INTERRUPTED = 130
FILES_BESIDE = 64  # open files beside the connections
NEEDS = {"speed": "trace", "block_tokens": "trace"}
EXCLUDES = [("workload", "trace"), ("rate", "trace"), ("rate", "concurrency"), ("speed", "concurrency")]
NO_SETTINGS = {"which", "api_key", "as_json"}


@click.command()
@router_argument
@option("--model", "NAME", "The model.  [default: the only one that is served]")
@option("--workload", "NAME", f"The kind of traffic: {', '.join(WORKLOADS)}.", type=KINDS, default="chatbot")
@option("--trace", "FILE", "Replay a trace or a router's request log, at its times.", type=click.Path(path_type=Path))
@option("--for", "SECONDS", "Send nothing after this time.  [default: 20; all of a trace]", name="for_s", type=ABOVE_0)
@option("--requests", "N", "Stop after so many requests, instead of a time or as well.", type=AT_LEAST_1)
@option("--rate", "R", "Open loop: requests a second at random, answered or not.", type=ABOVE_0)
@option("--concurrency", "C", "Closed loop: clients that each wait for an answer.  [default: 8]", type=AT_LEAST_1)
@click.option("--closed-loop", is_flag=True, help="Turns of a trace's sessions follow answers; come again after 429.")
@option("--speed", "X", "Replay a trace X times as fast.", type=ABOVE_0, default=1.0)
@option("--warm-up", "N", "The first requests, which are not counted.", type=click.IntRange(min=0), default=0)
@option("--seed", "K", "Equal seeds send equal requests.", type=int, default=0)
@option("--max-tokens", "N", "Ask for answers of this length.  [default: as planned]", type=AT_LEAST_1)
@option("--think", "SECONDS", "Between turns of multi-turn, on average.", name="think_s", type=AT_LEAST_0, default=2.0)
@option("--api", "NAME", "chat: messages; completions: one text.", type=APIS, default="chat")
@option("--block-tokens", "N", "Block size of a trace, if the file does not have it.", type=AT_LEAST_1)
@option("--timeout", "SECONDS", "Time limit of a whole answer.", name="timeout_s", type=ABOVE_0, default=600.0)
@option("--api-key", "KEY", "Send this key. Better given as OPENAI_API_KEY.", type=SECRET, envvar="OPENAI_API_KEY")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, in seconds and tokens.")
@click.pass_context
def bench(
    ctx: click.Context,
    /,
    which: str | None,
    model: str | None,
    workload: str,
    trace: Path | None,
    for_s: float | None,
    requests: int | None,
    rate: float | None,
    concurrency: int | None,
    closed_loop: bool,
    speed: float,
    warm_up: int,
    seed: int,
    max_tokens: int | None,
    think_s: float,
    api: str,
    block_tokens: int | None,
    timeout_s: float,
    api_key: str | None,
    as_json: bool,
) -> int:
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

    Ctrl-C shows the results so far. Exit status: 0 measured, 1 the endpoint cannot be asked or no request was answered,
    2 a value cannot be used, 130 ended by Ctrl-C.
    """
    check_options(NEEDS, EXCLUDES)
    if "think_s" in given_options() and workload != "multi-turn":
        raise Unusable("--think has no effect without --workload multi-turn; give both, or leave it out")
    url, replay = locate_router(which), None
    if trace is not None:
        try:
            replay = sped_up(read_trace(trace, block_tokens), speed)
        except OSError as error:
            raise Unusable(f"--trace: cannot read {str(trace)!r}: {error.strerror or error}") from error
        if warm_up >= (count := len(replay.requests)):
            raise Unusable(
                f"--warm-up {warm_up:,} leaves none of the {count:,} requests in {trace} to count; give less"
            )
        if requests is None and for_s is None:
            requests = count - warm_up
    elif requests is None and for_s is None:
        for_s = USUAL_S
    has_sessions = workload == "multi-turn" if replay is None else any(one.session for one in replay.requests)
    if closed_loop and not has_sessions:
        raise Unusable("--closed-loop needs sessions; give --workload multi-turn, or a --trace that names them")
    if rate is None and replay is None:
        concurrency = concurrency or USUAL_CLIENTS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # each connection is an open file
    if concurrency is not None and hard != resource.RLIM_INFINITY and concurrency + FILES_BESIDE > hard:
        raise Unusable(
            f"--concurrency {concurrency} needs as many open files, but the limit is {hard:,} (it was {soft:,}); "
            "raise `ulimit -Hn`, or use fewer"
        )

    def arrivals_of(seed: str) -> Iterator[Arrival]:
        if replay is not None:
            return limited(replayed(replay, by_session=closed_loop), max_tokens)
        talks = conversations(workload, seed, think_s)
        return limited(at_once(talks) if rate is None else arriving(talks, rate, seed), max_tokens)

    plan = Plan(
        target=target_of(url),
        wish=RequestSettings(model, str(seed), api == "chat"),
        arrivals=arrivals_of,
        limits=Limits(requests, for_s, warm_up, concurrency, closed_loop),
        key=api_key,
        timeout_s=timeout_s,
    )
    target = plan.target
    if not is_loopback(target.host) and ctx.get_parameter_source("api_key") is ParameterSource.ENVIRONMENT:
        click.echo(f"OPENAI_API_KEY from the environment is sent to {target.url}; unset it to send no key", err=True)
    with progress(f"asking {target.url}", requests and requests + warm_up) as tell:
        found = measured(plan, tell)
    settings = {"url": url, **{name: value for name, value in ctx.params.items() if name not in NO_SETTINGS}}
    result = summed_up(plan, found, {name: value for name, value in settings.items() if value is not None})
    click.echo(msgspec.json.encode(result, enc_hook=str).decode() if as_json else "\n".join(lines(result)))
    if result.interrupted:
        return INTERRUPTED
    summary = result.endpoints[0].figures
    return 0 if summary.requests > summary.failed else 1
