"""A replica on the shipped engine and scheduler, with a runner that only takes time.

A step is computed when it begins, and its results are seen when it ends.
"""

from collections.abc import Sequence
from functools import partial

from events.native import Load
from lab.replay import Agenda
from lab.simulation.job import MODEL, Job
from lab.simulation.replica import Observer
from lab.simulation.settings import Settings
from replica.config import EngineConfig, SimulatedConfig
from replica.engine.engine import Engine
from replica.messages import Output, Sampling, Submit
from replica.runners.clock import VirtualClock
from replica.runners.simulated import SimulatedRunner
from replica.tiers.simulated import SimulatedMover

ENDLESS = 10**9
VOCABULARY = (0, 2**20)


class EngineReplica:
    def __init__(self, number: int, settings: Settings, block_tokens: int, agenda: Agenda, observer: Observer) -> None:
        self._number = number
        self._agenda = agenda
        self._observer = observer
        self._clock = VirtualClock()
        config = EngineConfig(
            model=MODEL,
            engine="simulated",
            num_blocks=settings.capacity_blocks(block_tokens),
            host_blocks=settings.host_tokens // block_tokens,
            disk_blocks=settings.disk_tokens // block_tokens,
            block_size=block_tokens,
            max_model_len=ENDLESS,
            max_waiting=ENDLESS,
            enable_partial_reuse=False,
            max_step_s=0,
            simulated=SimulatedConfig(
                prefill_tokens_per_s=settings.prefill_tokens_per_s,
                decode_tokens_per_s=settings.decode_tokens_per_s,
                step_overhead_s=0.0,
            ),
        )
        rates = settings.rates()
        runner = SimulatedRunner(config.simulated, self._clock, VOCABULARY)
        self._mover = SimulatedMover(self._clock, rates, block_tokens, observer.read) if rates else None
        self._engine = Engine(config, runner, self._clock, self._mover)
        self.pool = self._engine.pool
        self._jobs: dict[int, Job] = {}
        self._is_stepping = False
        self._wakes_s = -1.0  # the end of a load for which nothing else is to do
        self._brought: dict[str, int] = {}  # tokens by medium, those that a request has been told of
        self._load = self._engine.load()

    def submit(self, job: Job) -> None:
        sampling = Sampling(max_tokens=max(1, job.request.output_tokens), ignore_eos=True, seed=job.number)
        priority = job.rank - self._clock.now_s()
        submit = Submit(job.number, job.prompt.packed(), sampling, priority=priority, sources=list(job.sources))
        refused = self._engine.submit(submit)
        if refused is not None:
            raise ValueError(refused.message)
        self._jobs[job.number] = job
        self._load = self._engine.load()
        if not self._is_stepping:
            self._step()

    def load(self) -> Load:
        return self._load

    def _step(self) -> None:
        self._is_stepping = True
        self._clock.sleep(self._agenda.now_s - self._clock.now_s())
        outputs = self._engine.step()
        self._agenda.at(self._clock.now_s(), partial(self._stepped, outputs))

    def _stepped(self, outputs: Sequence[Output]) -> None:
        events = self._engine.take_events()
        if events:
            self._observer.published(self._number, events)
        for output in outputs:
            self._take(output)
        self._load = self._engine.load()
        self._is_stepping = False
        if self._engine.only_loads:
            self._wake()
        elif self._engine.busy:
            self._step()

    def _wake(self) -> None:
        """Make the next step when the next load ends, unless there is something to compute before."""
        assert self._mover is not None
        next_s = self._mover.next_s
        assert next_s is not None, "loads are waited for that nobody carries out"
        if next_s != self._wakes_s:
            self._wakes_s = next_s
            self._agenda.at(next_s, self._woken)

    def _woken(self) -> None:
        self._wakes_s = -1.0
        if not self._is_stepping and self._engine.busy:
            self._step()

    def _take(self, output: Output) -> None:
        job = self._jobs[output.id]
        job.generated += output.token_ids
        if not job.first_s:
            job.first_s = self._agenda.now_s
            job.uncached_tokens = job.request.input_tokens - output.cached_tokens
            before, self._brought = self._brought, dict(self._engine.scheduler.transfers.loaded_tokens)
            # Tokens by medium since the last request: only their sum over all requests is exact.
            job.brought_tokens = {medium: tokens - before.get(medium, 0) for medium, tokens in self._brought.items()}
            self._observer.begun(job)
        if output.finish_reason is not None:
            del self._jobs[output.id]
            self._observer.ended(job)
