"""Decides how many replicas a model should have, from their reports. `look` takes the time as an argument.

More are wanted when a new prompt would wait for longer than the target, or when every replica has a queue because
its KV memory is full, for `up_after_s` without a break; one less when the others would be well off without it for
`down_after_s`. What is not known changes nothing.
"""

from collections.abc import Sequence
from typing import NamedTuple

from fleet.host.report import Report
from fleet.plan import MAX_REPLICAS, Autoscale

STALE_S = 5.0  # a measurement older than that says nothing
STARTS_S = 12  # times up_after_s: for this long a replica that starts counts as if it were there
SPARE = 0.5  # a prompt may wait this share of the target with one replica less
MAX_BUSY = 0.7  # the share of the prefill speed, or of the KV memory, in use with one replica less
FULL = 0.9  # the share of the KV memory in use: a prompt that waits may need more than the rest
MAX_PATIENCE = 16  # times down_after_s
SLOWEST = 0.1  # a replica is assumed to have at least this share of its prefill speed
# Engines that do not say it are taken to have these
ASSUMED_TOKENS_PER_S = 8000.0
ASSUMED_PROMPT_TOKENS = 1000.0


class Demand(NamedTuple):
    """The work of some replicas together, and how fast they do it."""

    replicas: int
    queued_tokens: float
    tokens_per_s: float  # the prefill that they can do
    done_tokens_per_s: float  # the prefill that they did lately
    waiting: bool  # every replica has a queue: all are saturated
    memory: float  # the part of their KV memory that requests hold
    assumed: bool  # whether part of the speed is a guess

    @property
    def pace(self) -> float:
        """Tokens prefilled per second. With a queue at every replica it is measured: decoding slows prefill down."""
        if not self.waiting or self.assumed:
            return self.tokens_per_s
        return min(self.tokens_per_s, max(self.done_tokens_per_s, SLOWEST * self.tokens_per_s))

    @property
    def full(self) -> bool:
        """Somebody waits at every replica, and there is hardly any KV memory to let them in."""
        return self.waiting and self.memory >= FULL

    def wait_s(self, replicas: int) -> float:
        """Estimate the wait of a new prompt with this number of replicas."""
        return self.queued_tokens / (self.pace * replicas / self.replicas)

    def busy(self, replicas: int) -> float:
        """Estimate the load with this number of replicas: the larger of prefill and KV memory."""
        return max(self.done_tokens_per_s / self.tokens_per_s, self.memory) * self.replicas / replicas

    def enough(self, target_s: float) -> int:
        """The fewest replicas that keep a new prompt's wait within the target."""
        fewest = min(self.queued_tokens / target_s / self.pace * self.replicas, MAX_REPLICAS)
        replicas = max(1, round(fewest))
        return replicas if self.wait_s(replicas) <= target_s else replicas + 1


class Autoscaler:
    def __init__(self, plan: Autoscale) -> None:
        self.plan = plan
        self.why = ""  # the reason of the last change
        self._heard: dict[str, tuple[float, float]] = {}  # each replica's newest measurement, and its time here
        self._there = 0
        self._short_since_s: float | None = None
        self._ample_since_s: float | None = None
        self._incomplete_since_s: float | None = None  # not all that are wanted are there
        self._fewer_s: float | None = None  # the last time that one was taken away
        self._patience = 1  # doubled when one was missed soon after it was taken away

    def look(self, wanted: int, reports: Sequence[Report], now_s: float) -> int:
        """The count that is wanted from now on."""
        least, most = self.plan.min, self.plan.max
        if not least <= wanted <= most:
            self._forget()
            self.why = f"it scales between {least} and {most} replicas"
            return min(max(wanted, least), most)
        # The recent reports, by this machine's clock: those of other nodes may be wrong.
        heard: dict[str, tuple[float, float]] = {}
        for report in reports:
            measured_at, came_s = self._heard.get(report.name, (0.0, now_s))
            heard[report.name] = (report.measured_at, now_s if report.measured_at != measured_at else came_s)
        self._heard = heard
        known = [one for one in reports if one.measured_at and now_s - heard[one.name][1] <= STALE_S]
        # Restart the wait for scaling up when a replica becomes ready.
        there = len(known)
        if there > self._there:
            self._short_since_s = None
        self._there = there
        if there >= wanted:
            self._incomplete_since_s = None
        elif self._incomplete_since_s is None:
            self._incomplete_since_s = now_s
        if not known:
            self._short_since_s = self._ample_since_s = None
            return wanted
        demand = demand_of(known)
        return self._more(wanted, demand, now_s) or self._fewer(wanted, len(reports), demand, now_s) or wanted

    def _more(self, wanted: int, demand: Demand, now_s: float) -> int | None:
        plan = self.plan
        slow = demand.wait_s(demand.replicas) > plan.ttft_target_s
        if not (slow or demand.full) or wanted >= plan.max:
            self._short_since_s = None
            return None
        if self._short_since_s is None:
            self._short_since_s = now_s
        since_s = self._incomplete_since_s
        are_starting = since_s is not None and now_s - since_s < STARTS_S * plan.up_after_s
        if now_s - self._short_since_s < plan.up_after_s or (demand.replicas < wanted and are_starting):
            return None
        more = min(max(demand.enough(plan.ttft_target_s), wanted + 1), 2 * wanted, plan.max)
        if self._fewer_s is not None:
            missed = now_s - self._fewer_s < plan.down_after_s * self._patience
            self._patience = min(2 * self._patience, MAX_PATIENCE) if missed else 1
        self._forget()
        self._incomplete_since_s = now_s
        self.why = (
            f"a new prompt would wait {demand.wait_s(demand.replicas):.1f} s, and should {plan.ttft_target_s:g} s at "
            f"most: {demand.queued_tokens:,.0f} tokens are queued, and {demand.pace:,.0f} are done in a second"
            f"{' (as is assumed)' if demand.assumed else ''}"
            if slow
            else f"every replica has a queue, and {demand.memory:.0%} of the KV memory is in use"
        )
        return more

    def _fewer(self, wanted: int, there: int, demand: Demand, now_s: float) -> int | None:
        plan, fewer = self.plan, wanted - 1
        ample = (
            demand.replicas == wanted == there
            and fewer >= max(1, plan.min)  # there would be no queue to see without any
            and demand.wait_s(fewer) <= SPARE * plan.ttft_target_s
            and demand.busy(fewer) <= MAX_BUSY
        )
        if not ample:
            self._ample_since_s = None
            return None
        if self._ample_since_s is None:
            self._ample_since_s = now_s
        if now_s - self._ample_since_s < plan.down_after_s * self._patience:
            return None
        self._forget()
        self._fewer_s = now_s
        self.why = (
            f"with one less a new prompt would wait {demand.wait_s(fewer):.1f} s, "
            f"and {demand.busy(fewer):.0%} of what the others can do would be taken"
        )
        return fewer

    def _forget(self) -> None:
        """Restart all waits after a change."""
        self._short_since_s = self._ample_since_s = None


def demand_of(reports: Sequence[Report]) -> Demand:
    loads = [report.load for report in reports]
    rates = [load.prefill_tokens_per_s for load in loads if load.prefill_tokens_per_s > 0]
    rate = sum(rates) / len(rates) if rates else ASSUMED_TOKENS_PER_S
    total = sum(report.total_blocks for report in reports)
    held = sum(report.total_blocks - report.load.free_blocks for report in reports if report.total_blocks)
    return Demand(
        replicas=len(loads),
        queued_tokens=sum(load.queued_prefill_tokens or load.waiting * ASSUMED_PROMPT_TOKENS for load in loads),
        tokens_per_s=rate * len(loads),
        done_tokens_per_s=sum(report.prompt_tokens_per_s * (1 - report.hit_rate) for report in reports),
        waiting=all(load.waiting for load in loads),
        memory=held / total if total else 0.0,
        assumed=len(rates) < len(loads),
    )
