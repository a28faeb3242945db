"""The health of one replica: breaker, silence, slow start and draining, as a state machine.

    faults in a row            the wait is over           one probe or request went well
    closed ---------> open <-------------> half-open ---------------------------> closed, slowly at first

Time is an argument. The results are the candidates' `unavailable` and `slowness`, and the times of probes.
"""

import random
from typing import Literal, TypeAlias

from msgspec import Struct

from router.placement.cost import Candidate

SLOWEST = 10.0  # cost factor of a replica when it comes back
MAX_REFUSALS = 8.0  # each doubles its cost; one is forgotten every second, and with every answer
# A status comes between an engine's steps, so its longest steps lately are known by the pauses between statuses.
PAUSES = 2.0  # silence is longer than this many times the longest step
LONGEST_PAUSE_S = 2.5  # more is a standstill, which says nothing about steps
PAUSE_KEPT = 0.998  # the longest pause fades by this with each status; there are about four a second
ASLEEP = "its engine sleeps"
STALLED = "its engine computes nothing"  # and how that shows
STEADY_S = 10.0  # closed for this long: the next opening waits as short as the first

Breaker: TypeAlias = Literal["closed", "open", "half-open"]


class HealthConfig(Struct, frozen=True):
    faults_to_open: int = 3  # faults in a row; a refused connection is enough by itself
    backoff_s: float = 0.5  # the first wait; it doubles with every opening
    most_backoff_s: float = 30.0
    jitter: float = 0.2  # each wait is shorter by up to this much of itself
    silence_s: float = 1.0  # silence of a replica that has sent statuses before
    slow_start_s: float = 10.0  # 0: off
    probe_interval_s: float = 5.0  # 0: no active checks; the next requests decide whether a breaker closes
    eager_probe_interval_s: float = 0.5  # while it is not reached yet, rests, or is silent


class Health:
    """One replica's health. Call `tick` a few times a second."""

    def __init__(self, rng: random.Random, now_s: float, config: HealthConfig | None = None) -> None:
        self.candidates: list[Candidate] = []  # all caches behind the address
        self.config = config or HealthConfig()
        self.breaker: Breaker = "closed"
        self.draining = False  # an operator's word
        self.resting: str | None = None  # the replica's own word: it takes nothing for now
        self.stalled: str | None = None  # why its engine computes nothing, though its server answers health checks
        self.reached = not self.config.probe_interval_s
        self._rng = rng
        self._faults = 0  # faults in a row
        self._last_fault = ""
        self._openings = 0  # openings in a row, without a steady time between them
        self._retry_at_s = 0.0
        self._opened_by_silence = False
        self._closed_since_s: float | None = None  # while it comes back
        self._refusals = 0.0  # their number at the time below; it fades
        self._refusals_s = now_s
        self._heard_s: float | None = None
        self.silent_s = 0.0  # 0: not silent
        self._longest_pause_s = 0.0  # between two statuses, lately
        self.slowness = 1.0  # cost factor
        self._probe_at_s = now_s
        self._rests_since_probe = False  # it said so after the last probe was sent, which may have come before
        self.tick(now_s)

    @property
    def silent(self) -> bool:
        return self.silent_s > 0

    @property
    def patience_s(self) -> float:
        """Seconds without a status that are no silence: more for an engine whose steps take long."""
        return max(self.config.silence_s, PAUSES * self._longest_pause_s)

    def heard_age_s(self, now_s: float) -> float | None:
        """Seconds since its last status; None if it sends none."""
        return None if self._heard_s is None else now_s - self._heard_s

    # ---- what happened

    def success(self, now_s: float) -> None:
        """Note a first byte of an answer without a fault of the replica's own."""
        if self._refusals:
            self._refusals = max(0.0, self._refusals - 1)
        if self._faults or not self.reached or self.breaker != "closed":
            self._works(now_s)

    def refusal(self, now_s: float) -> None:
        """Note an immediate refusal: prefer other replicas, however idle this one looks."""
        self._forget_refusals(now_s)
        self._refusals = min(MAX_REFUSALS, self._refusals + 1)
        self.tick(now_s)

    def fault(self, reason: str, now_s: float, *, refused: bool = False, silent: bool = False) -> None:
        """Note a fault of the replica's own (lost connection, time-out, 5xx); never a 4xx, nor a full one's 429 or 503.

        A replica that was never reached is still starting: nothing opens, and eager probes go on. `silent`: nothing was
        heard from it at all; it may recover at any moment, so it is tried again soon.
        """
        self._faults += 1
        self._last_fault = reason
        enough = refused or self._faults >= self.config.faults_to_open
        if self.reached and (self.breaker == "half-open" or (self.breaker == "closed" and enough)):
            config, wait_s = self.config, self.config.backoff_s
            if not silent:
                wait_s = min(config.most_backoff_s, config.backoff_s * 2**self._openings)
                self._openings = min(self._openings + 1, 30)
            self._opened_by_silence = silent
            self._retry_at_s = now_s + wait_s * self._rng.uniform(1 - config.jitter, 1)
            self.breaker = "open"
            self._closed_since_s = None
        self.tick(now_s)

    def probed(self, ok: bool, reason: str, now_s: float, *, silent: bool = False) -> None:
        """Note the result of an active health check."""
        self._probe_at_s = now_s + self._probe_interval_s()
        if not ok:
            self.fault(f"health check: {reason}", now_s, silent=silent)
        elif self.breaker != "open":  # an open breaker waits: a replica may look well and yet fail every request
            if not self._rests_since_probe:
                self.resting = None
            self._works(now_s)
            self.publish()

    def rests(self, reason: str) -> None:
        """Note the replica's own word that it takes no new work; a probe that is sent from now on may end it."""
        self.resting, self._rests_since_probe = reason, True
        self.publish()

    def stall(self, reason: str | None) -> None:
        """Note that its engine computes nothing; None: it does again."""
        if reason != self.stalled:
            self.stalled = reason
            self.publish()

    def heard(self, now_s: float) -> None:
        """Note a status. After silence it is a sign of life: an open breaker need not wait any longer."""
        if self._heard_s is not None and (pause_s := now_s - self._heard_s) < LONGEST_PAUSE_S:
            self._longest_pause_s = max(pause_s, self._longest_pause_s * PAUSE_KEPT)
        self._heard_s = now_s
        if self.silent_s:
            if self.breaker != "closed" and self._opened_by_silence:
                self._works(now_s)
            else:
                self._retry_at_s = now_s
            self.tick(now_s)

    def excuse(self, gap_s: float, now_s: float) -> None:
        """Subtract a standstill of the router itself from the replica's silence."""
        if self._heard_s is not None:
            self._heard_s = min(now_s, self._heard_s + gap_s)

    def drain(self) -> None:
        self.draining = True
        self.publish()

    def undrain(self) -> None:
        self.draining = False
        self.publish()

    # ---- probes and time

    def probe_due(self, now_s: float) -> bool:
        return bool(self.config.probe_interval_s) and self.breaker != "open" and now_s >= self._probe_at_s

    def probe_soon(self, now_s: float) -> None:
        self._probe_at_s = min(self._probe_at_s, now_s)

    def probing(self, now_s: float) -> None:
        """Note that a probe is sent; without a result, the next one is due after the interval."""
        self._rests_since_probe = False
        self._probe_at_s = now_s + self._probe_interval_s()

    def tick(self, now_s: float) -> None:
        """Apply the changes that time alone brings."""
        if self.breaker == "open" and now_s >= self._retry_at_s:
            self.breaker = "half-open"
            self._probe_at_s = now_s
        if self._heard_s is not None:
            silent_s = now_s - self._heard_s
            self.silent_s = silent_s if silent_s > self.patience_s else 0.0
        closed_since_s, slow_start_s = self._closed_since_s, self.config.slow_start_s
        self.slowness = 1.0
        if self.breaker != "closed":
            self.slowness = SLOWEST
        elif closed_since_s is not None and now_s < closed_since_s + slow_start_s:
            self.slowness = SLOWEST ** (1 - (now_s - closed_since_s) / slow_start_s)
        elif closed_since_s is not None and now_s - closed_since_s >= STEADY_S:
            self._closed_since_s, self._openings = None, 0
        if self._refusals:
            self._forget_refusals(now_s)
            self.slowness *= 2.0**self._refusals
        self.publish()

    def _forget_refusals(self, now_s: float) -> None:
        self._refusals = max(0.0, self._refusals - (now_s - self._refusals_s))
        self._refusals_s = now_s

    def _works(self, now_s: float) -> None:
        self._faults, self._last_fault = 0, ""
        changed = not self.reached or self.breaker != "closed"
        if self.breaker != "closed":
            self.breaker = "closed"
            # A replica that was only silent has not restarted, and needs no slow start.
            self._closed_since_s = now_s - self.config.slow_start_s if self._opened_by_silence else now_s
            self._opened_by_silence = False
        self.reached = True
        if changed:
            self.tick(now_s)

    def _probe_interval_s(self) -> float:
        eager = not self.reached or self.resting is not None or self.silent
        return self.config.eager_probe_interval_s if eager else self.config.probe_interval_s

    # ---- results

    def publish(self) -> None:
        """Tell the candidates; call it when one has come."""
        reason, may_try_anyway = None, False
        if self.draining:
            reason = "draining"
        elif self.resting is not None:
            reason = self.resting
        elif self.stalled is not None:
            reason = self.stalled
        elif not self.reached:
            reason = f"not reached yet: {self._last_fault}" if self._last_fault else "not reached yet"
        elif self.breaker == "open":
            reason = f"{self._last_fault} (faults in a row: {self._faults})"
            # A request sent to a silent replica would only wait there, and could not go elsewhere.
            may_try_anyway = not (self.silent or self._opened_by_silence)
        elif self.silent_s:
            reason = f"silent for {self.silent_s:.1f} s"
        elif self.breaker == "half-open" and self.config.probe_interval_s:
            reason = f"being tried again after: {self._last_fault}"
            may_try_anyway = not self._opened_by_silence
        for candidate in self.candidates:
            candidate.slowness, candidate.unavailable = self.slowness, reason
            candidate.may_try_anyway = may_try_anyway
