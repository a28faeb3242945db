"""The engine: `schedule -> start -> commit`, without sockets. Its owner brings the messages and takes the events away.

With a runner that runs ahead, a step is scheduled and started while the one before it is computed, and only then the
results of that one are waited for; with any other, each step is committed at once.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from events.messages import KnownEvent
from events.native import Load
from replica.cache.block_pool import BlockPool
from replica.cache.chain import Chain
from replica.cache.lower import LowerTiers
from replica.cache.moves import PULLED, Save, Transfer
from replica.config import EngineConfig
from replica.engine.rates import Speed, StepLimit, Window
from replica.engine.scheduler import Batch, QueueFull, Scheduler, TooLong
from replica.grammar.matcher import Matcher
from replica.messages import DiskCounters, Output, Refused, Stats, Submit, TierSnapshot
from replica.runners.clock import Clock
from replica.runners.request import Request
from replica.runners.runner import Finish, Runner
from replica.tiers.mover import Mover
from replica.tiers.transfers import Judgement

TENANT_SHARE = 0.5  # one cache salt may retain this much of all that may be retained
MAX_TOKENS_PER_S = 1e8  # a status has no faster ones


class Flight(NamedTuple):
    """A step that was started; `finish` waits for its results."""

    batch: Batch
    finish: Finish
    began_s: float


class Engine:
    """One model's requests. Submits and cancels are made between steps."""

    def __init__(self, config: EngineConfig, runner: Runner, clock: Clock, mover: Mover | None = None) -> None:
        self.config = config
        self.runner = runner
        self.clock = clock
        self.mover = mover  # None: there is no medium below the pool
        self.digests: dict[str, str] | None = None  # one for each adapter; None: adapters only name blocks
        if runner.adapters is not None:
            self.digests = {name: adapter.digest for name, adapter in runner.adapters.loaded.items()}
        events = config.events is not None
        self.pool = BlockPool(
            config.num_blocks,
            config.block_size,
            caching=config.enable_prefix_caching,
            partial=config.enable_partial_reuse,
            events=events,
            host_slots=config.host_blocks if mover is not None else 0,
            disk_slots=config.disk_blocks if mover is not None else 0,
            retained_blocks=int(config.num_blocks * config.retained_share),
            retained_per_tenant=int(config.num_blocks * config.retained_share * TENANT_SHARE),
        )
        self.pool.expire(clock.now_s())
        if mover is not None and self.pool.lower is not None:
            self.pool.lower.restore(mover.recover())
        for name, digest in (self.digests or {}).items():
            self.pool.forget_other_adapter(name, digest)
        self.speed = Speed()
        self.scheduler = Scheduler(self.pool, config, Judgement(self._pays_off, self.speed.prefill_s))
        self.step_limit = StepLimit(config.max_step_s)
        self.window = Window()
        self.steps = 0
        self.kv_events = 0
        self._arrivals = 0
        self._flying: Flight | None = None
        self._only_loads = False
        self._due: deque[Transfer] = deque()  # transfers that wait for a step to land
        self._landed_s = 0.0  # the time of the last results

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.requests or self.scheduler.transfers) or self._flying is not None

    @property
    def only_loads(self) -> bool:
        """True if nothing can be computed until blocks have come."""
        return self._only_loads and bool(self.scheduler.transfers)

    def submit_all(self, submits: Sequence[Submit], matchers: Sequence[Matcher] = ()) -> Refused | None:
        """Let all of them wait for their turn, or none; then say why not. Constrained ones have a matcher each."""
        room = self.config.max_waiting + self.config.max_num_seqs
        if len(submits) > room:
            message = f"the request has {len(submits)} choices, all prompts counted; at most {room} are taken at once"
            return Refused(submits[0].id, "invalid", message)
        for number, submit in enumerate(submits):
            refused = self.submit(submit, matchers[number] if matchers else None)
            if refused is not None:
                for taken in submits[:number]:
                    self.cancel(taken.id)
                return refused
        return None

    def submit(self, submit: Submit, matcher: Matcher | None = None) -> Refused | None:
        """Let the request wait for its turn, or say why not."""
        if not submit.prompt or len(submit.prompt) % 4 or len(submit.output) % 4:
            return Refused(submit.id, "invalid", "a prompt is at least one token id, packed as little-endian uint32")
        tokens = submit.prompt + submit.output
        highest = int(np.frombuffer(tokens, np.uint32).max())
        if highest >= self.runner.vocab_size:
            message = f"token id {highest} is not in the model's vocabulary of {self.runner.vocab_size} tokens"
            return Refused(submit.id, "invalid", message)
        lora_digest = ""
        if submit.lora_name is not None and self.digests is not None:
            if submit.lora_name not in self.digests:
                return Refused(submit.id, "invalid", f"the adapter {submit.lora_name!r} is not loaded")
            lora_digest = self.digests[submit.lora_name]
        self._arrivals += 1
        chain = Chain(
            array("I", tokens),
            self.config.block_size,
            self.config.model,
            lora_name=submit.lora_name,
            lora_digest=lora_digest,
            cache_salt=submit.cache_salt,
            extras=submit.extras,
        )
        request = Request(
            submit.id,
            chain,
            prompt_tokens=len(submit.prompt) // 4,
            sampling=submit.sampling,
            priority=(self.clock.now_s() + submit.priority, self._arrivals),
            matcher=matcher,
            sources=submit.sources if self.mover else (),
            retain=submit.retain,
            is_cold=submit.is_cold,
        )
        try:
            self.scheduler.submit(request)
        except QueueFull as full:
            # There should be room again after the queue's prefill, and the end of the first answer.
            prefill_s = self.speed.prefill_s(self.scheduler.queued_prefill_tokens())
            left = min((one.sampling.max_tokens - one.generated for one in self.scheduler.running), default=0)
            retry_after_s = min(60.0, max(1.0, prefill_s + left * self.speed.step_s))
            return Refused(submit.id, "full", str(full), retry_after_s)
        except TooLong as too_long:
            return Refused(submit.id, "too_long", str(too_long))
        return None

    def cancel(self, request_id: int) -> bool:
        return self.scheduler.cancel(request_id)

    def step(self) -> list[Output]:
        """Start the next step, and return the results of the previous one, or its own."""
        outputs: list[Output] = []
        self.settle()
        if self._flying is not None and not self.scheduler.may_run_ahead():
            outputs = self._land()
        batch = self.scheduler.schedule(self.step_limit.tokens)
        self._only_loads = not batch and self._flying is None
        if self.mover is not None:
            self.mover.computing = not self._only_loads
        self._begin_moves(batch)
        began_s = self.clock.now_s()
        started = Flight(batch, self.runner.start(batch), began_s) if batch else None  # nothing need not fly
        outputs += self._land()
        self._flying = started
        if not self.runner.ahead:
            outputs += self._land()
        self._begin_due(batch if self._flying is not None else [])
        return outputs

    def _land(self) -> list[Output]:
        """Commit the results of the step in flight, if any."""
        flight, self._flying = self._flying, None
        if flight is None:
            return []
        sampled = flight.finish()
        landed_s = self.clock.now_s()
        # Only the step before was computed until it landed.
        duration_s = landed_s - max(flight.began_s, self._landed_s)
        prefill_tokens = sum(scheduled.tokens for scheduled in flight.batch if scheduled.tokens > 1)
        self.speed.add(prefill_tokens, duration_s, len(flight.batch))
        self.step_limit.add(prefill_tokens, duration_s)
        self.steps += 1
        self._landed_s = self.pool.retention.now_s = landed_s
        return self.scheduler.commit(flight.batch, sampled)

    # ---- lower media

    def _begin_moves(self, batch: Batch) -> None:
        """Save what the next step overwrites, and begin with what requests wait for, in order.

        A load has to wait for a step that is underway: it may copy from the very blocks, or write what a request that
        was cancelled meanwhile would have had there.
        """
        lower, mover = self.pool.lower, self.mover
        if mover is None:
            return
        saves, transfers = self.scheduler.transfers.take_moves()
        self._due += transfers
        if saves and lower is not None:
            mover.save(saves)
            self._write(lower, mover, saves)
        if self._flying is None:
            self._begin_due(batch)

    def _begin_due(self, batch: Batch) -> None:
        """Begin the transfers into blocks that this step, the only one underway, does not copy from."""
        if not self._due or self.mover is None:
            return
        copied = {scheduled.copy.source for scheduled in batch if scheduled.copy is not None}
        while self._due and copied.isdisjoint(self._due[0].blocks):
            self.mover.begin(self._due.popleft())

    def settle(self) -> None:
        """Let requests run whose blocks have come, and name what has come to the disk."""
        lower, mover = self.pool.lower, self.mover
        if mover is None:
            return
        transfers, written = mover.landed()
        for transfer in transfers:
            self.scheduler.land(transfer)
        if lower is not None:
            lower.written(written)
            self._write(lower, mover, [save for transfer in transfers for save in transfer.saves])
        self._begin_moves([])

    def _write(self, lower: LowerTiers, mover: Mover, saves: Sequence[Save]) -> None:
        """Let what has been saved go on to the disk, once what was there is erased."""
        writes = lower.saved(saves)
        mover.erase(lower.take_erasures())
        mover.write(writes)

    def _pays_off(self, medium: str) -> bool:
        """Return True unless tokens are known to be computed sooner than loaded.

        Prompts of an engine that only decodes are computed elsewhere: routers have judged whether that pays off.
        """
        assert self.mover is not None
        if medium == PULLED and self.config.role == "decode":
            return True
        loaded = self.mover.speeds.blocks_per_s(medium) * self.config.block_size
        computed = self.speed.prefill_tokens_per_s
        return not loaded or not computed or loaded > computed

    def reset(self) -> bool:
        done = self.pool.reset()
        if done and self.mover is not None:
            self.mover.clear()
        return done

    def take_events(self) -> list[KnownEvent]:
        events = self.pool.take_events()
        self.kv_events += len(events)
        return events

    # ---- say

    def load(self) -> Load:
        speeds = dict[str, float]()  # tokens per second that come from each medium, as far as it is known
        if self.mover is not None:
            of_medium = self.mover.speeds.blocks_per_s
            found = {medium: of_medium(medium) * self.config.block_size for medium in self.mover.speeds.media()}
            speeds = {medium: min(speed, MAX_TOKENS_PER_S) for medium, speed in found.items() if speed}
        return Load(
            running=self.scheduler.admitted,
            waiting=self.scheduler.waiting,
            queued_prefill_tokens=self.scheduler.queued_prefill_tokens(),
            free_blocks=self.pool.free,
            cached_blocks=self.pool.named,
            prefill_tokens_per_s=self.speed.prefill_tokens_per_s,
            load_tokens_per_s=speeds,
            loading_tokens=self.scheduler.transfers.tokens(),
            host_blocks=self.pool.lower.host.num_slots if self.pool.lower is not None else 0,
            answer_delay_s=max(0.0, self.speed.growth_s) * self.scheduler.answer_tokens,
        )

    def stats(self) -> Stats:
        scheduler, lower, load = self.scheduler, self.pool.lower, self.load()
        loaded = scheduler.transfers.loaded_tokens
        stats = Stats(
            load=load,
            pool=self.pool.snapshot(),
            preemptions=scheduler.preemptions,
            prompt_tokens=scheduler.prompt_tokens,
            computed_prompt_tokens=scheduler.computed_prompt_tokens,
            generated_tokens=scheduler.generated_tokens,
            steps=self.steps,
            decode_tokens_per_s=self.speed.decode_tokens_per_s,
            kv_events=self.kv_events,
            constraint_failures=scheduler.constraint_failures,
            tiers={
                tier.medium: TierSnapshot(
                    total=tier.num_slots,
                    cached=tier.named,
                    evictions=tier.evictions,
                    loaded_tokens=loaded.get(tier.medium, 0),
                    load_tokens_per_s=load.load_tokens_per_s.get(tier.medium, 0.0),
                )
                for tier in (lower.tiers if lower is not None else ())
            },
            disk=DiskCounters() if self.mover is None else self.mover.disk_counters,
            host_skipped_saves=0 if lower is None else lower.unsaved,
            disk_skipped_writes=0 if lower is None else lower.unwritten,
        )
        stats.rates = self.window.add(self.clock.now_s(), stats)
        return stats

    def check(self) -> None:
        """Verify every invariant of scheduler and pool, and that whatever is underway is so in the step that flies."""
        self.scheduler.check()
        batch = [] if self._flying is None else self._flying.batch
        flying = {scheduled.request: scheduled for scheduled in batch}
        for request in self.scheduler.running:
            scheduled = flying.get(request)
            ends = request.computed if scheduled is None else scheduled.start + scheduled.tokens
            assert request.launched == ends, f"request {request.id} waits for tokens that are not computed"
            drawing = scheduled is not None and scheduled.samples
            assert request.drawing == drawing, f"request {request.id} waits for a token that is not drawn"
