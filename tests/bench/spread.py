"""The six kinds of traffic of `workloads` over four replicas: what the router keeps of one replica's hit rate.

Everything is in virtual time: shipped engines, each with the speed of `workloads`, and the shipped router without HTTP.
"""

from array import array
from itertools import count
from random import Random

from lab.simulation.fleet import SimulatedFleet
from lab.simulation.job import Job, SimulatedPrompt
from lab.simulation.settings import Settings
from lab.trace.requests import TraceRequest
from tests.bench.workloads import (
    BLOCK,
    LOAD,
    LONGEST_CONVERSATION,
    POOL_BLOCKS,
    PREFILL_TOKENS_PER_S,
    STEP_S,
    THINK_S,
    TURNS,
    WORKLOADS,
    Conversation,
    Prompt,
    Workload,
    middle,
    multi_turn,
)

REPLICAS = 4
SPAN_S = 240.0  # shorter than that of one replica: four have four times the requests
WARM_UP_S = 120.0


class Tokens(SimulatedPrompt, frozen=True, eq=False):
    """A prompt that is its own tokens."""

    def packed(self) -> bytes:
        return self.ids.tobytes()


class Traffic(SimulatedFleet):
    """Conversations continue some time after an answer."""

    def __init__(self, workload: Workload, replicas: int, policy: str, seed: int) -> None:
        settings = Settings(
            replicas=replicas,
            capacity_tokens=POOL_BLOCKS * BLOCK,
            prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
            decode_tokens_per_s=1 / STEP_S,
            model="engine",
        )
        super().__init__(settings, policy, BLOCK, seed)
        self.chance = Random(f"{workload.name} {seed}")
        self.jobs: list[Job] = []
        self.conversations: dict[int, Conversation] = {}
        self.numbers = count()
        shares = round(workload.requests_per_s * workload.mean_prompt_tokens / (LOAD * PREFILL_TOKENS_PER_S))
        rate = workload.requests_per_s / shares * replicas
        rate = rate / TURNS if workload.prompts is multi_turn else rate
        at_s = 0.0
        for coming in workload.prompts(self.chance):
            at_s += self.chance.expovariate(rate)
            if at_s > SPAN_S:
                break
            self.comes(at_s, coming)

    def comes(self, at_s: float, coming: Prompt | Conversation) -> None:
        self.left += 1
        self.agenda.at(at_s, lambda: self.asks(coming))

    def asks(self, coming: Prompt | Conversation) -> None:
        prompt = coming.turn(self.chance) if isinstance(coming, Conversation) else coming
        tokens = array("I", prompt.tokens)
        request = TraceRequest(self.agenda.now_s, len(tokens), prompt.output_tokens, ())
        job = Job(next(self.numbers), Tokens(tokens, len(tokens) // BLOCK, BLOCK, BLOCK, len(tokens)), request)
        if isinstance(coming, Conversation):
            self.conversations[job.number] = coming
        if request.at_s >= WARM_UP_S:
            self.jobs.append(job)
        self.arrive(job)

    def ended(self, job: Job) -> None:
        super().ended(job)
        conversation = self.conversations.pop(job.number, None)
        if conversation is None:
            return
        conversation.history += job.generated
        if len(conversation.history) < LONGEST_CONVERSATION:
            self.comes(self.agenda.now_s + self.chance.expovariate(1 / THINK_S), conversation)

    def measured(self) -> tuple[float, float]:
        """Hit rate and mean time to first token."""
        self.finish()
        computed = sum(job.uncached_tokens for job in self.jobs)
        hit_rate = 1 - computed / sum(job.request.input_tokens for job in self.jobs)
        return hit_rate, sum(job.ttft_s for job in self.jobs) / len(self.jobs)


def run(rounds: int) -> None:
    columns = ("one replica", f"{REPLICAS}, round robin", f"{REPLICAS}, least-loaded", f"**{REPLICAS}, cost**")
    print(f"\nHits and mean TTFT, median of {rounds} seeds:\n\n| traffic | {' | '.join(columns)} |")
    print("| --- " * (len(columns) + 1) + "|")
    for workload in WORKLOADS:
        cells = []
        for replicas, policy in ((1, "cost"), *((REPLICAS, name) for name in ("round-robin", "least-loaded", "cost"))):
            runs = [Traffic(workload, replicas, policy, seed).measured() for seed in range(rounds)]
            hits, ttft_s = (middle(figures) for figures in zip(*runs, strict=True))
            cells.append(f"{hits:.1%}, {ttft_s:.3f} s")
        print(f"| {workload.name} | {' | '.join(cells)} |", flush=True)
