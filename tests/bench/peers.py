"""Whole routers side by side, ours and others, before the same simulated replicas: hits, times to first token, CPU.

Ours runs by itself, and as the picker of an Envoy. The others are sglang-router 0.3.2 and vllm-router 0.1.17, each in a
Python environment of its own whose folder WARMROUTE_SGLANG_ROUTER and WARMROUTE_VLLM_ROUTER name; of one that is not
there the table says so. The traces are made by chance (tests/lab/traffic.py), or are all *.jsonl and *.jsonl.gz of
Mooncake's kind in the folder WARMROUTE_TRACES.

Every run has new replicas and a new router, and lasts a minute and more: `python -m tests.bench peers --rounds 3` takes
most of an hour and draws docs/peers.svg, `--rounds 1 --small` tries it all out in three minutes. Linux only: it reads
/proc.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from lab.bench.figures import figures
from lab.bench.load import LAG_LIMIT_S, Limits
from lab.bench.measure import Plan, measured
from lab.bench.probe import RequestSettings
from lab.bench.workloads import replayed
from lab.simulation.settings import DEFAULT_CAPACITY_TOKENS
from lab.trace.formats import read_trace
from lab.trace.requests import Trace, coarsened, sped_up
from router.members.spec import parse_target
from tests.bench.drawing import drawing
from tests.chaos.envoy import Change, gateway, heads_of_answers, port_of_picker
from tests.chaos.replicas import cpu_s, free_ports
from tests.chaos.routers import Fleet, RouterProcess, fleet, router
from tests.events.processes import DEADLINE_S, wait_until
from tests.lab.traffic import agents, conversations
from tests.processes import family
from tests.replica.serving import MODEL, Replica

REPLICAS = 4
BLOCK_TOKENS = 16
SCALE = 16  # prompts, answers, batches and caches are this many times smaller than those of a service
CACHE_BLOCKS = DEFAULT_CAPACITY_TOKENS // SCALE // BLOCK_TOKENS
STEP_TOKENS = 2048 // SCALE
LONGEST_TOKENS = 16_000
MODEL_TOKENS = 16_384  # with what a chat template adds
DECODE_STEP_TOKENS = 12.5  # a token generated takes as long as this many of a prompt; this keeps a full step's share
PICTURE = Path(__file__).parents[2] / "docs" / "peers.svg"
COLUMNS = ("TTFT mean", "TTFT p99", "hit rate", "router CPU per 1,000 requests", "failed")


class Size(NamedTuple):
    requests: int
    warm_up: int  # of these: not counted, but for CPU
    span_s: float


USUAL = Size(500, 50, 60.0)
SMALL = Size(40, 4, 6.0)


class Figures(NamedTuple):
    ttft_mean_s: float | None
    ttft_p99_s: float | None
    hit_rate: float | None
    cpu_s: float  # of all the router's processes, per 1,000 requests
    failed: int
    lag_s: float  # of the load generator
    used_replicas: int


class Contender(NamedTuple):
    name: str
    started: Callable[[Fleet], AbstractContextManager[Sequence[Replica]]]  # all its processes, first the one to ask


def beside(peer: "Peer") -> Contender:
    @contextmanager
    def started(replicas: Fleet) -> Iterator[Sequence[Replica]]:
        with peer.started(replicas.urls) as running:
            yield (running,)

    return Contender(peer.name, started)


class Peer(NamedTuple):
    package: str
    pinned: str
    home: str  # the environment variable
    options: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.package}, cache_aware"

    @property
    def folder(self) -> Path | None:
        named = os.environ.get(self.home)
        return Path(named) if named else None

    def absent(self) -> str | None:
        """Why it cannot be run."""
        if self.folder is None:
            return f"not run: {self.home} names no environment that has {self.package}"
        if not (self.folder / "bin" / self.package).exists():
            return f"not run: {self.folder} ({self.home}) has no bin/{self.package}"
        return None

    def version(self) -> str:
        code = f"from importlib.metadata import version; print(version({self.package!r}))"
        command = [f"{self.folder}/bin/python", "-c", code]
        return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout.strip()

    @contextmanager
    def started(self, urls: Sequence[str]) -> Iterator[Replica]:
        running = PeerProcess(f"{self.folder}/bin/{self.package}", urls, self.options)
        try:
            wait_until(running.is_ready, f"{self.package} is ready")
            yield running
        finally:
            for pid in family(running.process.pid)[1:]:
                with suppress(ProcessLookupError):
                    os.kill(pid, 9)
            running.process.kill()
            running.end(None)


class PeerProcess(Replica):
    def __init__(self, program: str, urls: Sequence[str], options: Sequence[str]) -> None:
        self._given_port = free_ports(2)
        self._count = len(urls)
        metrics = ("--prometheus-host", "127.0.0.1", "--prometheus-port", str(self._given_port + 1))
        here = ("--host", "127.0.0.1", "--port", str(self._given_port))
        self._start([program, *options, *here, *metrics, "--policy", "cache_aware", "--worker-urls", *urls])

    @property
    def port(self) -> int:
        return self._given_port

    def is_ready(self) -> bool:
        """Both say how many replicas they have found."""
        assert self.process.poll() is None, self.err
        with suppress(OSError):
            answer = self.get("/readiness")
            return answer.status == 200 and answer.json["healthy_workers"] == self._count
        return False


PEERS = (
    Peer("sglang-router", "0.3.2", "WARMROUTE_SGLANG_ROUTER", ("launch", "--log-level", "error")),
    Peer(
        "vllm-router",
        "0.1.17",
        "WARMROUTE_VLLM_ROUTER",
        ("--log-level", "error", "--worker-startup-check-interval", "1"),
    ),
)
NOT_FAIR = {
    "vllm-router, kv_aware": "not run: it asks every replica for a prompt's tokens by vLLM's "
    "/v1/chat/completions/render, which these have not, and credits no cached prefix without it",
}


def ours(policy: str) -> Contender:
    @contextmanager
    def started(replicas: Fleet) -> Iterator[Sequence[Replica]]:
        with following(replicas, "--policy", policy) as running:
            yield (running,)

    return Contender(f"warmroute, {policy}", started)


@contextmanager
def following(replicas: Fleet, *options: object) -> Iterator[RouterProcess]:
    """A router of ours that follows the events of all replicas."""
    with router(*replicas.as_options, "--log-level", "warning", *options) as running:
        ready: Callable[[], bool] = lambda: all(  # noqa: E731
            one["available"] and one["block_size"] for one in running.get("/replicas").json["replicas"]
        )
        wait_until(ready, "every replica's events are followed")
        yield running


@contextmanager
def behind_envoy(replicas: Fleet, *, changes: Sequence[Change] = ()) -> Iterator[Sequence[Replica]]:
    with (
        following(replicas, "--picker-listen", "127.0.0.1:0") as running,
        gateway(port_of_picker(running), *changes) as envoy,
    ):
        yield envoy, running


def run(rounds: int, *, small: bool = False) -> None:
    size = SMALL if small else USUAL
    absent = {peer.name: why for peer in PEERS if (why := peer.absent())} | NOT_FAIR
    present = [peer for peer in PEERS if peer.name not in absent]
    for peer in present:
        found = peer.version()
        print(f"{peer.package} {found}" + ("" if found == peer.pinned else f", and not {peer.pinned} as usual"))
    picked = Contender("Envoy and warmroute picker", behind_envoy)
    heads = Contender("the same, without answers' bodies", partial(behind_envoy, changes=[heads_of_answers]))
    contenders = [ours("cost"), picked, heads, ours("round-robin"), *map(beside, present)]
    by_trace: dict[str, dict[str, list[Figures]]] = {}
    for make in sources(size.requests):
        measured_runs: dict[str, list[Figures]] = {contender.name: [] for contender in contenders}
        for number in range(rounds):
            trace = make(number)
            said(trace, size, number)
            for contender in contenders if number % 2 == 0 else contenders[::-1]:
                measured_runs[contender.name].append(one_run(contender, trace, size, number))
        table(measured_runs, absent)
        by_trace[trace.name] = measured_runs
    if not small:
        picture(PICTURE, by_trace)
        print(f"{PICTURE} is drawn")


# ---- one run


def one_run(contender: Contender, trace: Trace, size: Size, number: int) -> Figures:
    """In the same round all are asked the same."""
    paced = sped_up(trace, trace.span_s / size.span_s)
    limits = Limits(max(1, len(paced.requests) - size.warm_up), None, size.warm_up)
    with fleet(REPLICAS, *speeds(paced)) as replicas, contender.started(replicas) as running:
        plan = Plan(
            target=parse_target(running[0].url),
            wish=RequestSettings(MODEL, f"peers {number}"),
            arrivals=lambda _: replayed(paced),
            limits=limits,
        )
        before_s: list[float] = []
        found = measured(plan, lambda ended: None if ended else before_s.append(cpu_of(running)))
        used_s = cpu_of(running) - before_s[0]
        if found.ran.was_interrupted:
            raise KeyboardInterrupt
        used = sum(replica.load()["pool"]["query_tokens"] > 0 for replica in replicas.replicas)
    ran = found.ran
    counted = figures(ran.outcomes)
    if counted.examples:
        print(f"  {contender.name}: {counted.examples}", file=sys.stderr)
    return Figures(
        ttft_mean_s=counted.ttft_s.mean,
        ttft_p99_s=counted.ttft_s.p99,
        hit_rate=counted.hit_rate,
        cpu_s=used_s * 1000 / len(ran.outcomes),
        failed=counted.failed,
        lag_s=ran.own.lag_p99_s,
        used_replicas=used,
    )


def speeds(paced: Trace) -> list[object]:
    """Such that its prompts, cached or not, are the load that is wanted."""
    prefill = prefill_tokens_per_s(paced)
    return [
        *("--block-size", BLOCK_TOKENS, "--num-blocks", CACHE_BLOCKS, "--max-model-len", MODEL_TOKENS),
        *("--max-num-batched-tokens", STEP_TOKENS, "--max-num-seqs", STEP_TOKENS),
        f"--set=simulated_prefill_tokens_per_s={round(prefill)}",
        f"--set=simulated_decode_tokens_per_s={round(prefill / DECODE_STEP_TOKENS, 1)}",
    ]


def load_of(trace: Trace) -> float:
    return {"agents": 3.0}.get(trace.name, 0.9)


def prefill_tokens_per_s(paced: Trace) -> float:
    return paced.input_tokens / paced.span_s / REPLICAS / load_of(paced)


def cpu_of(running: Sequence[Replica]) -> float:
    return sum(tree_cpu_s(one.process.pid) for one in running)


def tree_cpu_s(pid: int) -> float:
    return sum(cpu_s(one) for one in family(pid))


# ---- the traces


def sources(requests: int) -> list[Callable[[int], Trace]]:
    """Each gives the trace of a round, by its number."""
    named = os.environ.get("WARMROUTE_TRACES")
    if named is None:
        return [
            lambda number: shrunk(conversations(requests, number)),
            lambda number: shrunk(agents(requests, number)),
        ]
    paths = sorted(Path(named).glob("*.jsonl*"))
    if not paths:
        sys.exit(
            f"WARMROUTE_TRACES: {named!r} has no *.jsonl or *.jsonl.gz; name a folder with Mooncake's kind of traces"
        )
    return [excerpts(read_trace(path), requests) for path in paths]


def excerpts(whole: Trace, requests: int) -> Callable[[int], Trace]:
    def excerpt(number: int) -> Trace:
        first = number * requests % max(1, len(whole.requests) - requests + 1)
        chosen = whole.requests[first : first + requests]
        return shrunk(replace(whole, requests=[one._replace(at_s=one.at_s - chosen[0].at_s) for one in chosen]))

    return excerpt


def shrunk(trace: Trace, scale: int = SCALE) -> Trace:
    """Divide all lengths and block sizes, and leave out requests that are too long."""
    whole = coarsened(trace, -(-scale * BLOCK_TOKENS // trace.block_tokens))
    if whole.block_tokens % (scale * BLOCK_TOKENS):
        sys.exit(
            f"{trace.name} has blocks of {trace.block_tokens} tokens; only divisors and multiples of "
            f"{scale * BLOCK_TOKENS} can be used"
        )
    requests = [
        one._replace(input_tokens=-(-one.input_tokens // scale), output_tokens=-(-one.output_tokens // scale))
        for one in whole.requests
    ]
    fitting = [one for one in requests if one.input_tokens + one.output_tokens <= LONGEST_TOKENS]
    return replace(whole, block_tokens=whole.block_tokens // scale, requests=fitting)


# ---- the tables


def said(trace: Trace, size: Size, number: int) -> None:
    count = len(trace.requests)
    left_out = f"; {size.requests - count} are left out, being too long" if count < size.requests else ""
    print(
        f"\n{trace.name}, round {number + 1}: {count} requests in {size.span_s:g} s, the first {size.warm_up} not "
        f"counted, {trace.input_tokens / count:.0f} tokens each, raw load {load_of(trace)}{left_out}",
        flush=True,
    )


def table(measured_runs: dict[str, list[Figures]], absent: dict[str, str]) -> None:
    base = next(iter(measured_runs.values()))
    print(f"\nMedian of {len(base)} rounds (lowest to highest), and how many times {next(iter(measured_runs))}'s:\n")
    print(f"| router | {' | '.join(COLUMNS)} |\n| --- {'| --- ' * len(COLUMNS)}|")
    for name, runs in measured_runs.items():
        cells = [
            cell([one.ttft_mean_s for one in runs], [one.ttft_mean_s for one in base], seconds),
            cell([one.ttft_p99_s for one in runs], [one.ttft_p99_s for one in base], seconds),
            cell([one.hit_rate for one in runs], [one.hit_rate for one in base], "{:.1%}".format),
            cell([one.cpu_s for one in runs], [one.cpu_s for one in base], seconds),
            str(sum(one.failed for one in runs)),
        ]
        print(f"| {name} | {' | '.join(cells)} |")
    for name, why in absent.items():
        print(f"| {name} | {why} {'| ' * len(COLUMNS)}|")
    print()
    for name, runs in measured_runs.items():
        for warning in warnings(runs):
            print(f"{name}: {warning}")


def picture(path: Path, found: dict[str, dict[str, list[Figures]]]) -> None:
    """On the left mean times to first token, on the right the routers' CPU; medians, and from lowest to highest."""
    with drawing(path, title="Whole routers in front of the same 4 replicas", x="mean TTFT, s", y="") as left:
        sides = left.figure.add_gridspec(1, 2)
        left.set_subplotspec(sides[0])
        right = left.figure.add_subplot(sides[1], xlabel="router CPU per 1,000 requests, s", sharey=left)
        right.grid(alpha=0.3)
        right.spines[["top", "right"]].set_visible(False)
        names = list(next(iter(found.values())))
        height = 0.8 / len(found)
        for number, (trace, runs) in enumerate(found.items()):
            places = [row + (number - (len(found) - 1) / 2) * height for row in range(len(names))]
            for axes, field in ((left, "ttft_mean_s"), (right, "cpu_s")):
                figures = [
                    [value for one in runs[name] if (value := getattr(one, field)) is not None] for name in names
                ]
                middles = [statistics.median(values) for values in figures]
                reach = [
                    [middle - min(values) for middle, values in zip(middles, figures, strict=True)],
                    [max(values) - middle for middle, values in zip(middles, figures, strict=True)],
                ]
                label = trace if axes is left else None
                axes.barh(places, middles, height * 0.9, xerr=reach, label=label, color=f"C{number}", ecolor="0.3")
        left.set_yticks(range(len(names)), names)
        left.invert_yaxis()
        right.tick_params(labelleft=False)


def cell(found: Sequence[float | None], base: Sequence[float | None], show: Callable[[float], str]) -> str:
    """Ratios are of the same round."""
    known = [one for one in found if one is not None]
    if not known:
        return "-"
    ratios = [one / other for one, other in zip(found, base, strict=True) if one is not None and other]
    times = f", {statistics.median(ratios):.2f} times" if ratios and found != base else ""
    return f"**{show(statistics.median(known))}** ({show(min(known))} to {show(max(known))}){times}"


def seconds(value: float) -> str:
    return f"{value:.3g} s"


def warnings(runs: Sequence[Figures]) -> Iterator[str]:
    lag_s = max(one.lag_s for one in runs)
    if lag_s > LAG_LIMIT_S:
        yield f"the load generator was late by up to {lag_s * 1000:.0f} ms (p99 of a run); times hold that too"
    fewest = min(one.used_replicas for one in runs)
    if fewest < REPLICAS:
        yield f"in one run it used only {fewest} of {REPLICAS} replicas"
