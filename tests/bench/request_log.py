"""Measure what a finished request costs in the request log, and in the metrics sent by OTLP."""

import os
import random
from collections.abc import Callable
from time import time_ns
from types import SimpleNamespace
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from router.log_lines import Report
from router.members.members import Member
from router.members.spec import ReplicaSpec, Target
from router.placement.cost import Candidate, Question
from router.placement.decision import Decision
from router.placement.load import Placed, ReplicaLoad
from router.placement.policy import TieBreak, choose
from router.proxy.predicted_hit import PredictedHit
from router.proxy.request_summary import Notes, RequestSummary
from router.records.genai_metrics import GenaiMetrics
from router.records.request_log import RequestLog
from router.tenants.limits import Use
from tests.bench.measure import cpu_us, heading, row

PROMPT_TOKENS = 4096
BLOCK_TOKENS = 16
REQUESTS = 2000


class Scene:
    """A decision over this many replicas, and its request."""

    def __init__(self, replicas: int) -> None:
        chance = random.Random(1)
        keys = [chance.getrandbits(64) for _ in range(PROMPT_TOKENS // BLOCK_TOKENS)]
        self.members = [self._member(slot, chance) for slot in range(replicas)]
        matched = {member.slot: float(BLOCK_TOKENS * chance.randrange(200)) for member in self.members}
        question = Question(PROMPT_TOKENS, matched)
        self.decision: Decision = choose("cost", question, [one.candidate for one in self.members], TieBreak(1))
        self.feeds: Any = SimpleNamespace(known=lambda _: (123_456, None))
        some: Any = SimpleNamespace
        prompt = some(
            tokens=PROMPT_TOKENS, exact=True, lora=None, choices=1, keys=lambda _: keys, doubt=None,
            peek=some(model="llama", stream=True),
        )  # fmt: skip
        self.summary = RequestSummary(
            exchange=some(status=200, disconnected=False),
            admitted=some(request_id="req-0123456789ab-1"),
            arrived_s=1234.567,
            ended_s=1235.0,
            first_byte_s=1234.667,
            chat=True,
            model=some(name="llama"),
            generation=PredictedHit(prompt, self.decision, self.members[0], reported_tokens=2048),
            attempts=[self._attempt()],
            used=Use(0, PROMPT_TOKENS - 2048, 2048, 64),
            output_tokens=64,
        )

    def _member(self, slot: int, chance: random.Random) -> Member:
        candidate = Candidate(f"replica-{slot}", slot, chance.random() * 9000, 3, 1, 2, 512, 8123.456, 4096.0)
        nothing: Any = None
        load = ReplicaLoad(candidate, block_size=BLOCK_TOKENS, total_blocks=40_000)
        upstream = SimpleNamespace(target=Target("h", 1, False, ""))
        server: Any = SimpleNamespace(upstream=upstream, health=None, key_line=b"")
        member = Member(ReplicaSpec(name=candidate.name, url="http://h:1"), load, server, nothing)
        member.block_size, member.report = BLOCK_TOKENS, Report(1.7e9 + chance.random(), 1234.5, 99)
        return member

    def _attempt(self) -> Any:
        return SimpleNamespace(
            member=self.members[0], token_ids={0: [b"abcd"] * 64}, framed=True, fault=None, status=200, report=None,
            sent_order=5, begun_order=6, begun_s=1234.667, ended_order=7, ended_s=1235.0,
            placed=Placed(1, self.members[0].load, 1234.568, 2048, True, 0.5, 30.0),
        )  # fmt: skip

    def work(self, log: RequestLog) -> Callable[[], None]:
        def requests() -> None:
            for number in range(REQUESTS):
                notes = self.summary.notes = Notes()
                notes.decided(number, self.decision, self.members, self.feeds)
                log.over(self.summary)

        return requests

    def counting(self, metrics: GenaiMetrics) -> Callable[[], None]:
        def requests() -> None:
            for _ in range(REQUESTS):
                metrics.over(self.summary, time_ns())

        return requests


def by_the_sdk() -> Callable[[], None]:
    """As many values as `GenaiMetrics` takes from a request, into a histogram of OpenTelemetry's SDK."""
    metrics = GenaiMetrics()
    Scene(1).counting(metrics)()
    meter = MeterProvider([InMemoryMetricReader()]).get_meter("bench")
    one = next(iter(metrics))
    histogram = meter.create_histogram(one.name, one.unit, explicit_bucket_boundaries_advisory=one.bounds)
    attributes = [series.attributes for instrument in metrics for series in instrument.series()]

    def requests() -> None:
        for _ in range(REQUESTS):
            for of_series in attributes:
                histogram.record(0.3, of_series)

    return requests


def run(rounds: int) -> None:
    heading(f"the request log, a prompt of {PROMPT_TOKENS:,} tokens in blocks of {BLOCK_TOKENS}")
    log = RequestLog(os.devnull, bodies=False)
    for replicas in (4, 16, 64):
        scene = Scene(replicas)

        def prepare(scene: Scene = scene) -> Callable[[], None]:
            return scene.work(log)

        row(f"{replicas} replicas: CPU of a request", cpu_us(prepare, REQUESTS, rounds), "us")
    log.close()
    print()
    heading("the metrics of a streamed answer, counted to be sent by OTLP")
    row("CPU of a request", cpu_us(lambda: Scene(1).counting(GenaiMetrics()), REQUESTS, rounds), "us")
    row("the same values in a histogram of OpenTelemetry's SDK", cpu_us(by_the_sdk, REQUESTS, rounds), "us")
