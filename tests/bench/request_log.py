"""Measure the request log's cost per request: the notes at the decision, and the line at the end."""

import os
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from router.log_lines import Report
from router.members.members import Member
from router.members.spec import ReplicaSpec
from router.placement.cost import Candidate, Question
from router.placement.decision import Decision
from router.placement.load import ReplicaLoad
from router.placement.placement import Placed
from router.placement.policy import choose
from router.placement.tie_break import TieBreak
from router.proxy.log_notes import Notes
from router.proxy.request_summary import GenerationSummary, RequestSummary
from router.records.request_log import RequestLog
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
        prompt: Any = SimpleNamespace(tokens=PROMPT_TOKENS, exact=True, lora=None, keys=lambda _: keys)
        some: Any = SimpleNamespace
        self.summary = RequestSummary(
            exchange=some(status=200, disconnected=False),
            admitted=some(request_id="req-0123456789ab-1"),
            arrived_s=1234.567,
            ended_s=1235.0,
            first_byte_s=1234.667,
            generation=GenerationSummary(some(model="llama"), prompt, self.decision, self.members[0], None, 2048),
        )

    def _member(self, slot: int, chance: random.Random) -> Member:
        candidate = Candidate(f"replica-{slot}", slot, chance.random() * 9000, 3, 1, 2, 512, 8123.456, 4096.0)
        nothing: Any = None
        load = ReplicaLoad(candidate, block_size=BLOCK_TOKENS, total_blocks=40_000)
        server: Any = SimpleNamespace(upstream=None, health=None, key_line=b"")
        member = Member(ReplicaSpec(name=candidate.name, url="http://h:1"), load, server, nothing)
        member.block_size, member.report = BLOCK_TOKENS, Report(1.7e9 + chance.random(), 1234.5, 99)
        return member

    def work(self, log: RequestLog) -> Callable[[], None]:
        attempt: Any = SimpleNamespace(
            member=self.members[0], token_ids={0: [b"abcd"] * 64}, framed=True, fault=None,
            sent_order=5, begun_order=6, begun_s=1234.667, ended_order=7, ended_s=1235.0,
            placed=Placed(1, self.members[0].load, 1234.568, 2048, True, 0.5, 30.0),
        )  # fmt: skip

        def requests() -> None:
            for number in range(REQUESTS):
                notes = self.summary.notes = Notes()
                notes.decided(number, self.decision, self.members, self.feeds)
                self.summary.attempts = [attempt]
                log.over(self.summary)

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
