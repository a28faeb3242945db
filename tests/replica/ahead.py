"""A runner that computes in order, and returns results only on request."""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from replica.config import SimulatedConfig
from replica.engine.engine import Engine
from replica.runners.clock import Clock
from replica.runners.request import Request, Scheduled
from replica.runners.runner import Finish, SampledToken
from tests.replica.engines import RememberingRunner, engine
from tests.replica.tiers.simulated import VirtualClock


class Flying(NamedTuple):
    number: int
    scheduled: dict[Request, Scheduled]
    blocks: dict[Request, list[int]]
    drawn: dict[Request, int]


class AheadRunner(RememberingRunner):
    """A device with a clock and a memory of its own: it begins a step when the one before it is done.

    It fails when a step goes by what the engine cannot know yet, or by what it should know already.
    """

    ahead = True

    def __init__(
        self, speed: SimulatedConfig, clock: Clock, vocabulary: tuple[int, int], eos_token_ids: Sequence[int] = ()
    ) -> None:
        super().__init__(speed, VirtualClock(), vocabulary, eos_token_ids)
        self.host_clock = clock
        self.flying: deque[Flying] = deque()
        self.log: list[tuple[str, int]] = []
        self.batches: list[list[tuple[int, int, int]]] = []
        self.ahead_steps = 0  # started while another flew

    def start(self, batch: Sequence[Scheduled]) -> Finish:
        assert len(self.flying) < 2, "a third step was started while two are in flight"
        for scheduled in batch:
            self.verify(scheduled)
        self.clock.sleep(max(0.0, self.host_clock.now_s() - self.clock.now_s()))
        results, done_s = self.run(batch), self.clock.now_s()
        step = self.took_off(batch, results)

        def finish() -> list[SampledToken | None]:
            assert self.flying and self.flying[0] is step, f"step {step.number} is finished twice or out of order"
            self.flying.popleft()
            self.log.append(("finish", step.number))
            self.host_clock.sleep(max(0.0, done_s - self.host_clock.now_s()))
            return results

        return finish

    def took_off(self, batch: Sequence[Scheduled], results: Sequence[SampledToken | None]) -> Flying:
        self.ahead_steps += bool(self.flying)
        step = Flying(
            len(self.batches),
            {scheduled.request: scheduled for scheduled in batch},
            {scheduled.request: scheduled.request.blocks for scheduled in batch},
            {one.request: drawn.token for one, drawn in zip(batch, results, strict=True) if drawn is not None},
        )
        self.flying.append(step)
        self.log.append(("start", step.number))
        self.batches.append([(request.id, start, count) for request, start, count, _ in batch])
        return step

    def verify(self, scheduled: Scheduled) -> None:
        """Continue where the step in flight ends, with a token from it if needed."""
        request, start, count, _ = scheduled
        known = len(request.chain)
        position = len(self.tokens(request)) - request.prompt_tokens
        assert not scheduled.samples or scheduled.position == position, f"request {request.id} samples out of order"
        if not self.flying or request not in self.flying[-1].scheduled:
            assert start + count <= known, f"request {request.id} computes a token that is never sampled"
            return
        flying = self.flying[-1]
        before, sampling = flying.scheduled[request], request.sampling
        assert request.blocks is flying.blocks[request], f"request {request.id} was preempted in flight"
        assert start == before.start + before.tokens, (
            f"request {request.id} does not continue where its step in flight ends"
        )
        assert sampling.prompt_logprobs is None or request.generated, f"request {request.id} reads the wrong scores"
        if request not in flying.drawn:
            assert start + count <= known, f"request {request.id} computes a token that is never sampled"
            return
        assert (start, count) == (known, 1), f"request {request.id} computes more than the token being sampled"
        assert request.generated + 1 < sampling.max_tokens, f"request {request.id} continues after its last token"
        shaped = sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty
        assert not shaped, f"request {request.id} samples from unknown tokens"

    def sample(self, request: Request) -> SampledToken:
        return self.draw(request, len(self.tokens(request)) - request.prompt_tokens)

    def tokens(self, request: Request) -> list[int]:
        """Also the one that the flying step draws."""
        drawn = self.flying[-1].drawn if self.flying else {}
        return super().tokens(request) + ([drawn[request]] if request in drawn else [])


def ahead_engine(**changes: Any) -> tuple[Engine, AheadRunner]:
    one = engine(runner=AheadRunner, **changes)
    assert isinstance(one.runner, AheadRunner)
    return one, one.runner
