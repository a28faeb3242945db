"""Estimates of one replica's queue, speed and empty cache, from its reports and our requests since.

A native replica reports its queue a few times a second. Our requests after a report are added until the next one holds
them, and so are those that peers tell of. Of other replicas we know these requests, and the number of waiting ones from
the engine's /metrics. Every event costs O(1), and no record of a request stays after its end.
"""

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from api.measured_rate import MeasuredRate
from events.native import Load
from router.placement.cost import ASSUMED_TOKENS_PER_S, INFINITE, Candidate, Tenant
from router.placement.prices import UNKNOWN_RATES, loading_price

if TYPE_CHECKING:
    from router.placement.sessions import Turn

LEAST_TOKENS = 256  # a sample of less says more about the network than about prefill
TOGETHER_S = 0.005


class Speed:
    """A replica's prefill rate, learned from the times of our own first bytes; used if it does not report one.

    Requests that begin together were computed in one step of the engine and are one sample.
    """

    __slots__ = ("_began_s", "_last_s", "_measured", "_together_tokens", "tokens_per_s")

    def __init__(self) -> None:
        self.tokens_per_s = 0.0  # 0 while it is not known
        self._measured = MeasuredRate()
        self._last_s = float("-inf")  # the last first byte
        self._began_s = 0.0  # the beginning of the sample that may still grow
        self._together_tokens = 0

    def first_byte(self, tokens: int, sent_s: float, now_s: float) -> None:
        """Learn from a prompt's first byte and its computed tokens; prefills run one after the other."""
        if now_s - self._last_s >= TOGETHER_S:
            tokens_before, seconds = self._together_tokens, self._last_s - self._began_s
            self._together_tokens = 0
            if tokens_before >= LEAST_TOKENS and seconds > 0:
                self._measured.add(tokens_before, seconds)
                self.tokens_per_s = self._measured.per_s
            self._began_s = max(sent_s, self._last_s)
            self._last_s = now_s
        self._together_tokens += tokens


REPORT_AGE_S = 0.03  # a request sent this shortly before a report arrives may not be in it
MEAN_WEIGHT = 0.1  # the newest request's weight in the mean of uncached tokens
STALE_S = 10.0  # then a replica that is not heard has no requests but those that we know of
FAR_S = 1e12  # later than any end, and yet not INFINITE
MAX_FRESH = 1024  # the oldest count as reported if no report comes


class Sent(Struct, eq=False, gc=False):
    """One of our requests, or of a peer's, that has not ended."""

    id: int
    tokens: int  # tokens to compute, those to be brought at their price
    sent_s: float
    due_s: float = INFINITE  # expected end of its prefill, if its first byte comes with the last
    queued: bool = True  # its prefill is not done, as far as we know
    fresh: bool = True  # the replica's report may not hold it
    is_ours: bool = True  # False: a peer has sent it
    ranked: bool = False  # it has a queue position


class ReplicaLoad:
    """Keep `candidate`'s queue, counts, rate and empty cache up to date."""

    def __init__(self, candidate: Candidate, *, block_size: int = 0, total_blocks: int = 0) -> None:
        self.candidate = candidate
        self.block_size = block_size  # 0: unknown, and so is the empty cache
        self.total_blocks = total_blocks  # 0: unknown; the most blocks ever seen stand for it
        self._declared_blocks = total_blocks
        self._host_blocks = 0
        self._tell_size()
        self._start()

    def _start(self) -> None:
        self._sent: dict[int, Sent] = {}
        self._fresh: deque[Sent] = deque()  # sorted by the time of sending, begun and ended ones too
        self._unstreamed: deque[Sent] = deque()  # sorted by the time of sending
        self._fresh_queued = 0  # tokens of fresh requests whose prefill is not done
        self._fresh_given = 0  # tokens of fresh requests that take, or will take, empty cache
        self._queued = 0  # tokens of all our requests whose prefill is not done
        self._queued_requests = 0
        self._report: Load | None = None
        self._reported_s = 0.0
        self._told_s = -FAR_S
        self._counted_s = FAR_S  # the time of the last report or scrape: none so far
        self._reported_tokens = 0.0  # tokens of its queue, those being brought at their price
        self._drained = 0.0  # tokens of the reported queue that are known to be done since
        self._others_waiting = 0  # waiting ones at the last scrape
        self._mean_tokens = 0.0
        self._speed = Speed()

    def describe(self, block_size: int, total_blocks: int) -> None:
        """Set the size of its cache as the replica declares it; 0: unknown."""
        self.block_size = block_size
        self.total_blocks = self._declared_blocks = total_blocks
        self._tell_size()

    def _tell_size(self) -> None:
        if self.candidate.ages is not None:
            size = self.block_size
            self.candidate.ages.describe(size, self.total_blocks * size, self._host_blocks * size)

    # ---- our requests

    def sent(
        self,
        request_id: int,
        uncached_tokens: int,
        now_s: float,
        *,
        streamed: bool = True,
        priority_s: float | None = None,
        stands_back: bool = False,
        is_ours: bool = True,
    ) -> None:
        """Count a request that was sent, and the tokens of its prompt to compute, brought ones at their price.

        Not streamed: its first byte comes when all is generated, and says nothing about prefill. `priority_s`: it is
        computed as if it came this much later; None: the replica has an order of its own.
        """
        if request_id in self._sent:
            self.ended(request_id, now_s)
        candidate, tokens = self.candidate, max(1, uncached_tokens)
        self._sent[request_id] = one = Sent(request_id, tokens, now_s, is_ours=is_ours)
        if priority_s is not None:
            one.ranked = True
            candidate.queue_positions.add(request_id, now_s + priority_s, tokens, stands_back=stands_back)
        if not streamed:
            rate = candidate.prefill_tokens_per_s
            one.due_s = now_s + (candidate.queued_tokens + tokens) / rate if rate else FAR_S
            self._unstreamed.append(one)
        self._fresh.append(one)
        self._fresh_queued += tokens
        self._fresh_given += tokens
        if len(self._fresh) > MAX_FRESH:
            self._counts_as_reported(self._fresh.popleft())
        self._mean_tokens += (tokens - self._mean_tokens) * (MEAN_WEIGHT if self._mean_tokens else 1.0)
        self._queued += tokens
        self._queued_requests += 1
        candidate.in_flight += is_ours
        candidate.all_in_flight += 1
        candidate.assigned_tokens += tokens
        self.tick(now_s)

    def begun(self, request_id: int, now_s: float) -> None:
        """Note a request's first byte: its prefill is done."""
        one = self._sent.get(request_id)
        if one is None or not one.queued:
            return
        if one.due_s == INFINITE:
            self._speed.first_byte(one.tokens, one.sent_s, now_s)
        self._leaves_queue(one)
        if not one.fresh:
            # It was in the report, perhaps half done: no more has left the queue since than the replica can compute.
            computable = self.candidate.prefill_tokens_per_s * (now_s - self._reported_s)
            self._drained = max(self._drained, min(self._drained + one.tokens, computable))
        self.tick(now_s)

    def ended(self, request_id: int, now_s: float) -> None:
        """Remove a request that completed, failed or lost its client; unknown ones are from before `forget`."""
        one = self._sent.pop(request_id, None)
        if one is None:
            return
        if one.queued:
            self._leaves_queue(one)
            if one.fresh:  # it will compute nothing more
                self._fresh_given -= one.tokens
                one.tokens = 0
        self.candidate.in_flight -= one.is_ours
        self.candidate.all_in_flight -= 1
        self.tick(now_s)

    def tick(self, now_s: float) -> None:
        """Take all requests without streaming out of the queue whose prefill should be done; update the candidate."""
        unstreamed = self._unstreamed
        while unstreamed and (not unstreamed[0].queued or unstreamed[0].due_s <= now_s):
            one = unstreamed.popleft()
            if one.queued:
                self._leaves_queue(one)
        candidate, ages = self.candidate, self.candidate.ages
        if candidate.running + candidate.waiting > candidate.all_in_flight and now_s - self._counted_s > STALE_S:
            candidate.running, candidate.waiting = candidate.all_in_flight, 0
        report = self._report
        candidate.is_crowded = bool(candidate.queue_positions.waiting) or (
            ages is not None and ages.capacity_pages > 0 and ages.may_evict
        )
        if report is None:
            candidate.queued_tokens = self._queued + self._others_waiting * self._mean_tokens
            candidate.prefill_tokens_per_s = self._speed.tokens_per_s
            candidate.empty_tokens = None
            return
        left = self._reported_tokens - self._drained
        candidate.queued_tokens = (left if left > 0 else 0.0) + self._fresh_queued
        candidate.prefill_tokens_per_s = report.prefill_tokens_per_s or self._speed.tokens_per_s
        if self.block_size:
            # Blocks are named as they fill, so nearly all blocks held by requests are cached.
            blocks = min(report.free_blocks, self.total_blocks - report.cached_blocks)
            taken = report.queued_prefill_tokens + report.loading_tokens + self._fresh_given
            empty = blocks * self.block_size - taken
            candidate.empty_tokens = empty if empty > 0 else 0.0

    def _leaves_queue(self, one: Sent) -> None:
        one.queued = False
        if one.ranked:
            self.candidate.queue_positions.discard(one.id)
        self._queued -= one.tokens
        self._queued_requests -= 1
        if one.fresh:
            self._fresh_queued -= one.tokens

    def _counts_as_reported(self, one: Sent) -> None:
        one.fresh = False
        self._fresh_given -= one.tokens
        if one.queued:
            self._fresh_queued -= one.tokens

    # ---- what the replica says

    def reported(self, load: Load, now_s: float) -> None:
        """Take the load from a native status."""
        self._report, self._reported_s, self._drained = load, now_s, 0.0
        self._reported_tokens = load.queued_prefill_tokens
        if load.loading_tokens:
            rate = load.prefill_tokens_per_s or self._speed.tokens_per_s or ASSUMED_TOKENS_PER_S
            self._reported_tokens += loading_price(load.load_tokens_per_s, rate) * load.loading_tokens
        self.candidate.load_tokens_per_s, self.candidate.answer_delay_s = load.load_tokens_per_s, load.answer_delay_s
        fresh = self._fresh
        while fresh and fresh[0].sent_s <= now_s - REPORT_AGE_S:
            self._counts_as_reported(fresh.popleft())
        if not self._declared_blocks:
            self.total_blocks = max(self.total_blocks, load.free_blocks, load.cached_blocks)
            self._tell_size()
        if load.host_blocks != self._host_blocks:
            self._host_blocks = load.host_blocks
            self._tell_size()
        self.candidate.running, self.candidate.waiting, self._counted_s = load.running, load.waiting, now_s
        self.tick(now_s)

    def scraped(self, running: int, waiting: int, now_s: float, *, told: bool = False) -> None:
        """Take the load from the /metrics of an engine without statuses; it counts our waiting requests, too.

        `told`: from its own stream, which is fresher than its metrics.
        """
        if told:
            self._told_s = now_s
        elif now_s - self._told_s < STALE_S:
            return
        self.candidate.running, self.candidate.waiting, self._counted_s = running, waiting, now_s
        self._others_waiting = max(0, waiting - self._queued_requests)
        self.tick(now_s)

    def forget(self) -> None:
        """Reset all estimates and requests, as the replica has restarted."""
        candidate = self.candidate
        candidate.in_flight = candidate.all_in_flight = candidate.running = candidate.waiting = 0
        candidate.assigned_tokens = candidate.answer_delay_s = 0.0
        candidate.load_tokens_per_s = UNKNOWN_RATES
        candidate.kv_read = candidate.kv_layout = ""  # it will describe itself again
        candidate.queue_positions.clear()
        if candidate.ages is not None:
            candidate.ages.clear()
        self.total_blocks = self._declared_blocks
        self._tell_size()
        self._start()
        self.tick(0.0)

    def check(self) -> None:
        queued = [one for one in self._sent.values() if one.queued]
        assert self._queued == sum(one.tokens for one in queued)
        assert self._queued_requests == len(queued)
        assert self.candidate.in_flight == sum(one.is_ours for one in self._sent.values())
        assert self.candidate.all_in_flight == len(self._sent)
        assert self._fresh_queued == sum(one.tokens for one in queued if one.fresh)
        assert self._fresh_given == sum(one.tokens for one in self._fresh)
        assert all(one.fresh for one in self._fresh)
        self.candidate.queue_positions.check()
        assert len(self.candidate.queue_positions) <= max(0, len(queued) - 1)


class Placed(Struct, eq=False, gc=False):
    """A request at a replica, from when it is sent until it has ended."""

    load: ReplicaLoad
    sent_s: float
    uncached_tokens: int = 1
    streams: bool = True  # its first byte says that its prefill is done
    priority_s: float | None = None  # computed as if it had been sent this much later; None: in the replica's order
    awaited_s: float = 0.0  # how long its blocks count as stored without an event
    awaited: tuple[list[int], int] | None = None  # these blocks, and the number to withdraw them by if it never begins
    pages: Sequence[int] = ()  # pages that count as cached, likewise
    fetched_tokens: int = 0  # tokens whose KV comes from another replica
    is_ours: bool = True  # False: a peer has sent it
    tenant: Tenant | None = None  # the tenant that it counts for
    stands_back: bool = False  # who overtakes it harms nobody, as its tenant was given more than its share
    has_begun: bool = False
    is_batch: bool = False  # it has several prompts: its first byte says that one of them is computed
    turn: "Turn | None" = None  # of a session
    id: int = 0

    @property
    def awaited_keys(self) -> int:
        return 0 if self.awaited is None else len(self.awaited[0])
