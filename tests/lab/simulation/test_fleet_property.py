"""Replicas that prefill one request at a time, against the same thing written down in the plainest way."""

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from lab.simulation.fleet import simulated
from lab.simulation.settings import Settings
from lab.trace.requests import Trace, TraceRequest

BLOCK = 8
# Odd numbers, so that no two things happen at the same time: their order would then be anybody's.
PREFILL_TOKENS_PER_S = 10.37
DECODE_TOKENS_PER_S = 41.93


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Prompts that begin alike, none of which ends at a block's end (whose last block would be computed again)."""
    numbers: dict[tuple[int, ...], int] = {}
    requests = []
    at_s = 0.0
    for number in range(draw(st.integers(1, 25))):
        at_s += draw(st.integers(1, 400)) / 97
        path = draw(st.lists(st.integers(0, 1), max_size=5))
        blocks = [numbers.setdefault(tuple(path[: end + 1]), len(numbers)) for end in range(len(path))]
        tokens = len(path) * BLOCK + draw(st.integers(1, BLOCK - 1))
        requests.append(TraceRequest(at_s, tokens, draw(st.integers(1, 300)), (*blocks, 10_000 + number)))
    return Trace("t", BLOCK, requests)


class PlainReplica:
    def __init__(self, blocks: int) -> None:
        self.room = blocks
        self.used: dict[int, int] = {}
        self.unused: OrderedDict[int, None] = OrderedDict()  # cached; the first is evicted first
        self.private = 0  # blocks of running requests that are not full
        self.ends: list[tuple[float, TraceRequest]] = []
        self.ready_s = 0.0

    def serve(self, request: TraceRequest) -> tuple[float, int]:
        """Serve a request; return the time of its first token and the number of computed tokens."""
        now_s = max(self.ready_s, request.at_s)
        self.end_until(now_s)
        *full, _ = request.blocks
        while True:
            matched = 0
            while matched < len(full) and (full[matched] in self.used or full[matched] in self.unused):
                matched += 1
            rescued = sum(block in self.unused for block in full[:matched])
            free = self.room - len(self.used) - self.private - rescued
            if len(full) - matched + 1 <= free:
                break
            now_s = min(at_s for at_s, _ in self.ends)
            self.end_until(now_s)
        for block in full[:matched]:
            self.unused.pop(block, None)
            self.used[block] = self.used.get(block, 0) + 1
        self.private += 1
        while len(self.unused) + len(self.used) + self.private + len(full) - matched > self.room:
            self.unused.popitem(last=False)
        computed = request.input_tokens - matched * BLOCK
        for block in full[matched:]:
            self.used[block] = 1
        self.ready_s = now_s + computed / PREFILL_TOKENS_PER_S
        self.ends.append((self.ready_s + request.output_tokens / DECODE_TOKENS_PER_S, request))
        return self.ready_s, computed

    def end_until(self, now_s: float) -> None:
        for at_s, request in sorted(self.ends):
            if at_s <= now_s:
                self.ends.remove((at_s, request))
                self.private -= 1
                for block in reversed(request.blocks[:-1]):
                    self.used[block] -= 1
                    if not self.used[block]:
                        del self.used[block]
                        self.unused[block] = None


@given(trace=traces(), replicas=st.integers(1, 3), blocks=st.integers(6, 20))
def test_every_request_is_computed_and_answered_as_in_the_plain_model(trace: Trace, replicas: int, blocks: int) -> None:
    settings = Settings(
        replicas=replicas,
        capacity_tokens=blocks * BLOCK,
        prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
        decode_tokens_per_s=DECODE_TOKENS_PER_S,
    )
    jobs = simulated(trace, settings, "round-robin", seed=0)
    plain = [PlainReplica(blocks) for _ in range(replicas)]
    for job in jobs:
        first_s, computed = plain[job.replica].serve(job.request)
        assert job.uncached_tokens == computed
        assert abs(job.first_s - first_s) < 1e-6
