"""The flow of a request under random events, with a shell that has replicas, a queue and a client in one object."""

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from api.errors import ApiError
from router.members.broken import Broken
from router.placement.decision import Decision
from router.proxy.flow import (
    ANSWERING,
    MOVING,
    OVER,
    PREFILLING,
    PROMPTING,
    READING,
    SENT,
    TRANSITIONS,
    WAITING,
    Flow,
    State,
)
from router.proxy.retries import TABLE, RetryBudget, Row, refusal

ANSWER = b"0123456789"
NAMES = ("a", "b", "c", "d")
LOSSES: tuple[dict[str, bool], ...] = ({}, {"refused": True}, {"silent": True}, {"late": True}, {"ours": True})
STATUSES = (400, 429, 500, 501, 503)
STEPS, RUNS = 60, 4000
ASKED, ANSWERED = ("head", "head", "refused", "broke"), ("bytes", "bytes", "bytes", "broke")  # what may come next


class Attempt(SimpleNamespace):
    def __init__(self, name: str, suspicion: str = "") -> None:
        server = SimpleNamespace(names=frozenset({name}), suspicion=suspicion)
        super().__init__(member=SimpleNamespace(name=name, server=server), framed=False, is_cancelled=False)

    def cancel(self) -> None:
        self.is_cancelled = True


class Shell:
    """Everything around the flow of one request; what it does beside the rules fails at once."""

    def __init__(self, draw: random.Random, *, is_single: bool) -> None:
        self.draw = draw
        self.is_single = is_single
        self.flow = Flow(self, RetryBudget(), 5.0, is_single)
        self.now_s = 100.0
        self.may_repeat = draw.random() < 0.7
        self.streams = draw.random() < 0.6
        self.may_resume = draw.random() < 0.5
        self.has_begun = False
        self.given, self.kept = b"", b""
        self.attempt: Attempt | None = None
        self.computes = self.is_queued = False
        self.wakes = 0
        self.ends: list[str] = []
        self.lessons: Counter[str] = Counter()
        self.seen: set[State] = set()
        self.asked: list[str] = []

    # ---- the port

    def choose(self) -> Decision | None:
        assert not (self.ends or self.attempt or self.computes or self.is_queued), "it is placed once at a time"
        if not self.has_begun and not self.flow.is_fresh and self.draw.random() < 0.05:
            self.flow.outdated()
            return None
        able = [name for name in NAMES if name not in self.flow.tried]
        chosen, rejection = None, "tried" if not able else self.draw.choice(("full", "unavailable"))
        if able and self.draw.random() < 0.8:
            chosen = SimpleNamespace(name=self.draw.choice(able))
        question = SimpleNamespace(now_s=self.now_s, came_s=100.0)
        candidates = [SimpleNamespace(name=name, role=None) for name in NAMES]
        made = SimpleNamespace(
            chosen=chosen, rejection=rejection, question=question, candidates=candidates, refusal=lambda: "none"
        )
        return cast(Decision, made)

    def send(self, decision: Decision) -> bool:
        assert decision.chosen is not None and not self.ends
        if self.draw.random() < 0.05:
            raise ApiError(429, "the key's limit")
        if self.has_begun and self.draw.random() < 0.2:
            return False
        if not self.is_single and self.draw.random() < 0.1:
            self.computes = True
            self.flow.elsewhere()
            return True
        assert not self.given or self.may_resume, "else the bytes would come a second time"
        self.attempt = Attempt(decision.chosen.name, self.draw.choice(("", "it is silent")))
        self.asked.append(decision.chosen.name)
        self.flow.sent(self.now_s)
        return True

    def queue(self, decision: Decision, since_s: float, until_s: float, not_before_s: float) -> None:  # noqa: ARG002
        assert since_s <= self.now_s and not_before_s < self.now_s + 3
        if self.now_s >= until_s or self.draw.random() < 0.05:
            self.flow.no_room_in_time(1.0)
        else:
            self.is_queued = True

    def learn(self, row: Row, reason: str) -> None:
        assert self.attempt is not None and reason
        self.lessons[row.what] += 1

    def end_attempt(self) -> None:
        assert self.attempt is not None
        self.attempt, self.kept = None, b""

    def others(self) -> bool:
        return self.draw.random() < 0.8

    def complete(self) -> tuple[bool, str | None]:
        assert self.has_begun
        if self.given == ANSWER:
            self.end("complete")
            return True, None
        return False, None if self.may_resume or not self.given else "it cannot be continued"

    def refuse(self, error: ApiError) -> None:
        assert not self.has_begun, "a client gets one head"
        self.end(f"refused: {error.status}")

    def break_off(self, why: str) -> None:
        assert why and (self.has_begun or self.is_single)
        self.end("broken off")

    def wake_in(self, delay_s: float) -> None:
        assert delay_s > 0
        self.wakes += 1

    # ---- the end, as an exchange makes it: it calls everybody once

    def end(self, how: str) -> None:
        self.ends.append(how)
        self.flow.over(self.now_s)
        if self.attempt is not None:
            self.attempt.cancel()
            self.end_attempt()
        self.is_queued = self.computes = False

    # ---- events

    def step(self) -> None:
        """Have one thing happen that can happen now."""
        draw, flow = self.draw, self.flow
        self.seen.add(flow.state)
        self.now_s += draw.choice((0.01, 0.3, 2.0))
        if draw.random() < 0.02:
            self.end("the client left")
        elif flow.state is READING:
            flow.body()
        elif flow.state is PROMPTING:
            flow.prompted(draw.choice((0.0, 0.002)))
        elif self.wakes and draw.random() < 0.5:
            self.wakes -= 1
            if not self.is_queued:
                flow.place()
        elif self.is_queued:
            self.is_queued = False
            if draw.random() < 0.9:
                flow.place()
            else:
                flow.no_room_in_time(1.0)
        elif self.computes:
            self.computes = False
            flow.computed()
        elif self.attempt is not None:
            self.of_attempt(self.attempt)

    def of_attempt(self, attempt: Attempt) -> None:
        flow, draw, has_answered = self.flow, self.draw, self.flow.state is ANSWERING
        what = draw.choice(ANSWERED if has_answered else ASKED)
        if what == "head":
            flow.head()
            self.has_begun = self.has_begun or self.streams
        elif what == "bytes":
            position = len(self.kept or self.given)
            part = ANSWER[position : position + draw.randrange(1, 4)]
            if self.streams:
                self.given += part
            else:
                self.kept += part
            if len(self.kept or self.given) == len(ANSWER):
                self.given, self.has_begun = self.kept or self.given, True
                self.end("complete")
        elif what == "refused":
            if not self.has_begun and draw.random() < 0.1:
                flow.unread(cast(Any, attempt))
                return
            row, reason = refusal(draw.choice(STATUSES), b"")
            if flow.refused(cast(Any, attempt), row, reason, self.now_s):
                assert not self.has_begun, "a client gets one head"
                self.has_begun = True
                self.end("passed on")
        else:
            broken = Broken("gone", **draw.choice(LOSSES))
            flow.broke(cast(Any, attempt), broken, has_bytes=bool(self.given))
        if what in ("refused", "broke") and self.attempt is not attempt and not self.is_single:
            assert attempt.is_cancelled or what == "broke", "a refusal that nobody gets is not read on"


def run(seed: int) -> Shell:
    draw = random.Random(seed)
    shell = Shell(draw, is_single=draw.random() < 0.15)
    for _ in range(STEPS):
        if not shell.ends:
            shell.step()
    if not shell.ends:
        shell.end("the client left")
    return shell


@pytest.fixture(scope="module")
def runs() -> list[Shell]:
    return [run(seed) for seed in range(RUNS)]


def test_each_request_ends_once_and_leaves_nothing_behind(runs: list[Shell]) -> None:
    for shell in runs:
        assert len(shell.ends) == 1 and shell.flow.state is OVER
        assert shell.attempt is None and not shell.is_queued and not shell.computes
        shell.flow.place()  # a timer of the past
        shell.flow.broke(cast(Any, Attempt("a")), Broken("gone"), has_bytes=False)
        assert len(shell.ends) == 1


def test_a_client_gets_each_byte_once_and_a_complete_answer_whole(runs: list[Shell]) -> None:
    for shell in runs:
        assert ANSWER.startswith(shell.given)
        assert shell.ends != ["complete"] or shell.given == ANSWER


def test_what_has_effects_and_has_arrived_is_sent_once(runs: list[Shell]) -> None:
    with_effects = [shell for shell in runs if not shell.may_repeat and not shell.streams]
    lost = TABLE[3].what
    assert any(shell.lessons[lost] for shell in with_effects)
    assert all(shell.lessons[lost] <= 1 for shell in with_effects)


def test_a_gateway_is_named_one_replica(runs: list[Shell]) -> None:
    assert all(len(shell.asked) <= 1 for shell in runs if shell.is_single and not shell.flow.retries)


def test_the_random_events_reach_every_state_and_every_end(runs: list[Shell]) -> None:
    assert set.union(*(shell.seen for shell in runs)) == set(State) - {OVER}
    ends = Counter(shell.ends[0].partition(":")[0] for shell in runs)
    assert set(ends) == {"complete", "refused", "broken off", "passed on", "the client left"}
    assert min(ends.values()) > RUNS / 50
    assert any(shell.flow.resumes and shell.ends == ["complete"] for shell in runs)
    moved = {state for after in TRANSITIONS.values() for state in after}
    assert {WAITING, SENT, ANSWERING, PREFILLING, MOVING} <= moved


@pytest.mark.parametrize("state", list(State))
def test_an_event_that_cannot_come_in_a_state_changes_nothing(state: State) -> None:
    shell = Shell(random.Random(0), is_single=False)
    for event in ("body", "outdated", "head", "elsewhere"):
        shell.flow.state = state
        if state not in TRANSITIONS[event]:
            with pytest.raises(KeyError):
                getattr(shell.flow, event)()
            assert shell.flow.state is state
