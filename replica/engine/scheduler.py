"""Decides what each step computes: one queue, a budget of tokens per step, no difference between prefill and decode.

A request asks for the tokens of its chain that are not computed yet: many after admission, one while it decodes.
Decodes are served first. What is left of the budget goes to prompts in order of priority, whether they run already or
wait; without priorities, whoever came first. When blocks run out, the running request of the lowest priority gives its
blocks back and waits again; it will find most of them.

A step may be scheduled while the one before it still flies: what is launched then counts as computed, and what is being
drawn as a token, whichever it will be. `may_run_ahead` says whether that is enough to go by.
"""

import itertools
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from api.retention import tenant_of
from kernels.spans import Copy
from replica.cache.block_pool import BlockPool
from replica.cache.moves import Transfer
from replica.cache.names import NO_MATCH, NO_PART, Match, PartialBlock
from replica.config import EngineConfig
from replica.messages import Output
from replica.runners.request import Request, Scheduled
from replica.runners.runner import SampledToken
from replica.tiers.transfers import UNKNOWN, Judgement, Transfers

Batch: TypeAlias = list[Scheduled]

MEAN_WEIGHT = 0.1  # the newest answer's weight in their mean length
MAX_SKIPPED = 64  # requests that a step looks at only to find that they must wait for another's prefix


class QueueFull(Exception):
    """As many requests wait as may."""


class TooLong(Exception):
    """The request could never run, even alone."""


class Scheduler:
    def __init__(self, pool: BlockPool, limits: EngineConfig, judgement: Judgement = UNKNOWN) -> None:
        if limits.max_num_batched_tokens < limits.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {limits.max_num_batched_tokens}; it must be at least max_num_seqs, "
                f"{limits.max_num_seqs}, or some of the running requests would never get their turn"
            )
        self.pool = pool
        self.limits = limits
        self.running: list[Request] = []  # sorted by priority
        self.requests: dict[int, Request] = {}
        self.preemptions = 0
        self.constraint_failures = 0
        self.prompt_tokens = 0
        self.computed_prompt_tokens = 0
        self.generated_tokens = 0
        self.answer_tokens = 0.0  # the mean length of the last answers
        self.transfers = Transfers(pool, judgement)
        self.readers: Mapping[int, int] = {}  # references to blocks that others than requests have
        self._waiting: list[tuple[tuple[float, int], Request]] = []  # a heap

    # ---- requests come and go

    def submit(self, request: Request) -> None:
        """Let it wait; QueueFull or TooLong if it cannot."""
        request.limit = limit = min(request.limit, self.limits.max_model_len)
        # The length comes first: nobody should be told to come back with what never fits.
        tokens, most = len(request.chain), self.limits.max_model_len
        if tokens >= most:
            found = f"the prompt has {tokens} tokens and leaves no room for an answer"
            raise TooLong(f"This model's maximum context length is {most} tokens. However, {found}")
        longest, capacity = max(tokens, limit), self.pool.num_blocks * self.pool.block_size
        if longest > capacity:
            raise TooLong(
                f"{request.prompt_tokens} prompt tokens and up to {longest - request.prompt_tokens} generated ones "
                f"never fit in the cache of {capacity} tokens ({self.pool.num_blocks} blocks of {self.pool.block_size})"
            )
        # Those for whom there is a place only wait for the next step.
        queue = self.waiting - (self.limits.max_num_seqs - self.admitted)
        if queue >= self.limits.max_waiting:
            raise QueueFull(f"{self.waiting} requests wait already, and no more may (max_waiting)")
        match = self._look_up(request)
        request.uncached_tokens = len(request.chain) - self.pool.block_size * (len(match.blocks) + len(match.lower))
        self.requests[request.id] = request
        heappush(self._waiting, (request.priority, request))

    def cancel(self, request_id: int) -> bool:
        """Give everything back at once; False if there is no such request (any more)."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return False
        if request.is_loading:  # its blocks are being written, and are given back when that ends
            self.transfers.cancelled += 1
            return True
        if request.blocks:
            self._stop_running(request)
        elif len(self._waiting) > 2 * self.waiting + 64:  # those who have left are dropped when their turn comes
            self._waiting = [entry for entry in self._waiting if self._is_here(entry[1])]
            heapify(self._waiting)
        return True

    def _is_here(self, request: Request) -> bool:
        return self.requests.get(request.id) is request

    def _stop_running(self, request: Request) -> None:
        del self.running[bisect_left(self.running, request.priority, key=_priority)]
        self.pool.keep_tail(request.chain, request.blocks, request.computed)
        # Mark the blocks of the beginnings to keep, as far as they are named.
        chain, size = request.chain, self.pool.block_size
        for beginning in request.retain:
            count = min(beginning.tokens, request.prompt_tokens) // size
            blocks = request.blocks[: min(count, chain.named)]
            self.pool.retain(blocks, tenant_of(chain.cache_salt), beginning.ttl_s)
        # Of a prompt that will not come again, what it has found stays; one that is preempted needs all of it itself.
        is_over = request.is_cold and not self._is_here(request)
        self.pool.release(request.blocks, (request.cached_tokens or 0) // size if is_over else None)
        request.blocks = []

    # ---- one step

    def may_run_ahead(self) -> bool:
        """Return True if the next step can be scheduled while one flies, False if only when that one has landed.

        No request may be preempted in flight, so every request needs room for its next token.
        """
        if any(request.needs_results for request in self.running):
            return False
        room, size = self.pool.free, self.pool.block_size
        return len(self.running) <= room or room >= sum(
            request.launched == len(request.blocks) * size and request.decodes for request in self.running
        )

    def schedule(self, prefill_tokens: int | None = None) -> Batch:
        """Choose the work of the next step, with a limit on prefill tokens; empty if there is none."""
        batch: Batch = []
        size, preemptions = self.pool.block_size, self.preemptions
        # Whoever needs one token gets it, whatever prompt has priority: no answer stalls for another's prefill.
        for request in self.running:  # those at the end may be preempted meanwhile
            if request.decodes:
                tokens = request.launched + 1
                if tokens <= len(request.blocks) * size or self._make_room(request, tokens):
                    batch.append(request.launch(1))
        budget = self.limits.max_num_batched_tokens - len(batch)
        if prefill_tokens is not None:
            budget = min(budget, prefill_tokens)
        self._prefill(batch, budget, admits=self.preemptions == preemptions)
        return batch

    def _prefill(self, batch: Batch, budget: int, *, admits: bool) -> None:
        """Share out the budget by priority, among prompts that run already and prompts that wait and find room."""
        running = deque(request for request in self.running if request.remaining > 1)
        skipped: list[Request] = []
        while budget:
            may_admit = admits and self.admitted < self.limits.max_num_seqs and len(skipped) < MAX_SKIPPED
            while self._waiting and not self._is_here(self._waiting[0][1]):
                heappop(self._waiting)
            waiting = self._waiting[0][1] if may_admit and self._waiting else None
            scheduled = None
            if waiting is None or (running and running[0].priority < waiting.priority):
                if not running:
                    break
                scheduled = running.popleft().launch(budget)
            else:
                heappop(self._waiting)
                match = self._look_up(waiting)
                other = self._computing_prefix(waiting, len(match.blocks))
                if other is None:
                    scheduled = self._start(waiting, match, budget)
                    admits = bool(waiting.blocks)  # nobody overtakes a request for whose blocks there is no room
                elif other in running:  # its prompt is computed now, in the place of the one that waits for it
                    running.remove(other)
                    scheduled = other.launch(budget)
                if not waiting.blocks:
                    skipped.append(waiting)
            if scheduled is not None:
                batch.append(scheduled)
                budget -= scheduled.tokens
        for request in skipped:
            heappush(self._waiting, (request.priority, request))

    def _make_room(self, request: Request, tokens: int) -> bool:
        """Reserve blocks for this many tokens, preempting the last request; False if that is the request itself."""
        new = -(-tokens // self.pool.block_size) - len(request.blocks)
        while new > 0:
            blocks = self.pool.take((), new)
            if blocks is not None:
                request.blocks += blocks
                self.transfers.taken()
                break
            victim = self.running[-1]
            assert victim.launched == victim.computed, f"request {victim.id} is preempted while it is computed"
            self._stop_running(victim)
            victim.uncached_tokens = victim.remaining  # it will find the rest, if nobody takes it in between
            victim.computed = victim.launched = 0
            if not victim.generated:
                victim.prompt_logprobs.clear()  # it computes its whole prompt again
            victim.preemptions += 1
            self.preemptions += 1
            heappush(self._waiting, (victim.priority, victim))
            if victim is request:
                return False
        return True

    def _look_up(self, request: Request) -> Match:
        return NO_MATCH if request.computes_whole_prompt else self.pool.match(request.chain)

    def _start(self, request: Request, match: Match, budget: int) -> Scheduled | None:
        """Admit the request with its cached prefix, and schedule it, unless it waits for blocks of lower media first.

        It has no blocks, and nothing has changed, if there is no room.

        What it copies from needs no reference, although `take` may hand just that block out, to this request or to a
        later one of the same step. The runner does all copies of a step in order and before it writes any KV, and no
        source is the target of an earlier copy: a block that has been handed out can no longer be found.
        """
        pool, chain = self.pool, request.chain
        matched = len(match.blocks)
        # Blocks for all of its tokens now: half a prompt that waits for blocks would only be in the way.
        new = -(-len(chain) // pool.block_size) - matched
        if pool.free < new:
            return None  # before a part is looked for, step after step
        found = self.transfers.look(request, match)
        part = NO_PART if found or request.computes_whole_prompt else pool.part(chain, match)
        hits = [*match.blocks, part.source] if part.adoptable else match.blocks
        blocks = pool.take(hits, new - part.adoptable)
        if blocks is None:
            self.transfers.abandon(found)
            return None
        request.blocks = blocks
        chain.named, chain.identity = matched, match.identity
        request.computed = request.launched = matched * pool.block_size + part.tokens
        if found:
            self.transfers.begin(request, matched, found)
            return None
        self.transfers.taken()
        self._run(request, match, part)
        is_copied = part.tokens > 0 and not part.adoptable
        copy = Copy(part.source, blocks[matched], part.tokens) if is_copied else None
        return request.launch(budget, copy)

    def _run(self, request: Request, match: Match, part: PartialBlock = NO_PART) -> None:
        """Let the request run from the tokens on that it has found."""
        if not request.computes_whole_prompt:
            self.pool.count_lookup(len(request.chain), match, part, again=request.preemptions > 0)
        if request.cached_tokens is None:
            request.cached_tokens = min(request.computed, request.prompt_tokens)
            self.prompt_tokens += request.prompt_tokens
        insort(self.running, request, key=_priority)

    def land(self, transfer: Transfer) -> None:
        """Let a request run whose blocks have come; give them back if it was cancelled meanwhile."""
        request = self.transfers.land(transfer)
        if self._is_here(request):
            named = request.chain.named
            self._run(request, Match(request.blocks[:named], request.chain.identity or 0))
        else:
            self.transfers.cancelled -= 1
            self.pool.release(request.blocks)
            request.blocks = []

    def _computing_prefix(self, request: Request, matched: int) -> Request | None:
        """A request that computes or loads the next block of its prompt, so that it need not itself.

        Less than a block is not worth a step: it is waited for only together with blocks before it.
        """
        keys = request.chain.keys
        is_last = matched >= (len(request.chain) - 1) // self.pool.block_size
        if is_last or not self.pool.caching or request.computes_whole_prompt:
            return None
        for other in itertools.chain(self.running, self.transfers.requests):
            its = other.chain
            is_ahead = its.named <= matched < len(its.keys) and its.identity is not None
            if is_ahead and its.keys[matched] == keys[matched]:
                return other
        return None

    def commit(self, batch: Batch, sampled: Sequence[SampledToken | None]) -> list[Output]:
        """Commit a step's results for the requests that still exist.

        While it flew, they may have been cancelled, or the step before may have drawn the token that ends their answer.
        Their blocks were free at once, and what the step writes there harms nobody: it writes after the `computed`
        tokens, the only ones that can be found; and whoever has been given such a block since has it written or copied
        by a later step, whose work begins when this one's is done.
        """
        outputs: list[Output] = []
        size = self.pool.block_size
        for (request, start, count, _), drawn in zip(batch, sampled, strict=True):
            if not self._is_here(request):
                continue
            request.computed = start + count
            filled = request.computed // size
            if filled > request.chain.named:
                self.pool.store(request.chain, request.blocks, filled, lasting=not request.is_cold)
            if start < request.prompt_tokens:
                self.computed_prompt_tokens += min(count, request.prompt_tokens - start)
                if request.computed >= request.prompt_tokens:  # others may have the same prompt, and this one goes on
                    self.pool.keep_tail(request.chain, request.blocks, request.computed)
            if drawn is None:
                continue
            request.chain.append(drawn.token)
            self.generated_tokens += 1
            sampling, reason = request.sampling, None
            if drawn.token in sampling.stop_token_ids and request.generated >= sampling.min_tokens:
                reason = "stop"
                if request.matcher is not None and request.matcher.failed:
                    # A constraint that could not be followed further has ended the answer, not the model.
                    self.constraint_failures += 1
                    reason = "length"
            elif len(request.chain.tokens) >= request.limit:
                reason = "length"
            if reason is not None:
                self.answer_tokens += MEAN_WEIGHT * (request.generated - self.answer_tokens)
                del self.requests[request.id]
                self._stop_running(request)
            logprobs = None if drawn.logprobs is None else [drawn.logprobs]
            is_scored = sampling.prompt_logprobs is not None and request.generated == 1
            of_prompt = request.prompt_logprobs if is_scored else None
            outputs.append(Output(request.id, [drawn.token], reason, request.cached_tokens or 0, logprobs, of_prompt))
        return outputs

    # ---- say

    @property
    def admitted(self) -> int:
        """Requests that have blocks; a cancelled one has them as long as something is loaded into them."""
        return len(self.running) + len(self.transfers)

    @property
    def waiting(self) -> int:
        return len(self.requests) - self.admitted + self.transfers.cancelled

    def waiting_requests(self) -> Iterable[Request]:
        return (request for _, request in self._waiting if self._is_here(request))

    def queued_prefill_tokens(self) -> int:
        """Tokens to compute before all present requests have a first token; a flying step counts as not computed."""
        waiting = sum(request.uncached_tokens for request in self.waiting_requests())
        waiting += sum(request.uncached_tokens for request in self.transfers.requests)
        uncomputed = (len(request.chain) - request.computed for request in self.running)
        return waiting + sum(tokens for tokens in uncomputed if tokens > 1)

    def check(self) -> None:
        self.pool.check()
        uses = dict(self.readers)
        for request in self.running:
            held, filled = len(request.blocks), request.computed // self.pool.block_size
            assert request.computed <= request.launched <= request.length, f"request {request.id} is ahead of itself"
            assert held * self.pool.block_size >= request.launched, f"request {request.id} lacks blocks"
            assert request.chain.named <= filled, f"request {request.id} has named blocks that are not filled"
            assert len(set(request.blocks)) == held, f"request {request.id} has a block twice"
            for index, block in enumerate(request.blocks):
                uses[block] = uses.get(block, 0) + 1
                ready = index * self.pool.block_size + self.pool.findable_tokens(block)
                assert ready <= request.computed or not self.pool.findable_tokens(block), (
                    f"tokens of request {request.id} can be found before they are computed"
                )
        loading = list(self.transfers.requests)
        for block in (block for request in loading for block in request.blocks):
            uses[block] = uses.get(block, 0) + 1
        for block in range(self.pool.num_blocks):
            assert self.pool.references(block) == uses.get(block, 0), f"block {block} has a reference without a holder"
        assert [r.priority for r in self.running] == sorted(r.priority for r in self.running), "running is out of order"
        waiting = {request.id for request in self.waiting_requests()}
        assert len(waiting) == sum(1 for _ in self.waiting_requests()), "a request waits twice"
        assert waiting.isdisjoint(r.id for r in self.running), "a request runs and waits"
        here = {request.id for request in loading if self._is_here(request)}
        assert len(here) == len(loading) - self.transfers.cancelled, "cancelled requests are miscounted"
        assert self.requests.keys() == waiting | here | {r.id for r in self.running}, "a request is lost"
        assert all(not request.blocks for request in self.waiting_requests()), "a waiting request holds blocks"
        assert not any(r.launched or r.drawing for r in self.waiting_requests()), "a waiting request is in flight"
        assert self.admitted <= self.limits.max_num_seqs, "too many run"


def _priority(request: Request) -> tuple[float, int]:
    return request.priority
