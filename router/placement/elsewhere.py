"""The choice to compute a prompt where its answer is generated, or at another replica that hands its KV over. Pure.

    here  = queue + prompt                          and every answer generated there waits for the prompt
    there = queue + prompt + transfer + OVERHEAD_S  and every answer generated there, where that replica does both

Both are in seconds that requests wait, added up, from the rates and queues of the two decisions. The prompt goes
elsewhere if that saves more than `threshold_s`: two requests instead of one, and estimates that may be wrong.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from api.measured_rate import MeasuredRate
from router.placement.cost import Candidate, Question
from router.placement.decision import Decision
from router.placement.prices import PULL, TOKENS_PER_S

Mode: TypeAlias = Literal["auto", "always", "never"]

OVERHEAD_S = 0.02  # of the second request: it is parsed and scheduled again
LEAST_GAIN_S = 0.05
LEAST_GAIN = 0.2  # as a share of the cost here
FORGET_S = 60.0
LEAST_TOKENS = 256  # a prompt with fewer to compute is never worth it: vLLM itself fetches no less than 64


class Transfers:
    """The speed at which KV has come from other replicas lately: tokens over seconds from sending to the first byte.

    It is forgotten when nothing new comes: transfers that seemed too slow are tried again.
    """

    __slots__ = ("_at_s", "_measured")

    def __init__(self) -> None:
        self._measured = MeasuredRate()
        self._at_s = 0.0  # of the last one

    def fetched(self, tokens: int, seconds: float, now_s: float) -> None:
        """Learn from one answer whose prompt was fetched; long prompts weigh more."""
        if tokens >= LEAST_TOKENS:
            if now_s - self._at_s > FORGET_S:
                self._measured = MeasuredRate()
            self._measured.add(tokens, seconds)
            self._at_s = now_s

    def measured_tokens_per_s(self, now_s: float) -> float:
        """0 while it is not known."""
        return 0.0 if now_s - self._at_s > FORGET_S else self._measured.per_s

    def tokens_per_s(self, now_s: float) -> float:
        """The measured speed; while it is not known, the usual one."""
        return self.measured_tokens_per_s(now_s) or TOKENS_PER_S[PULL]


class Split(Struct, frozen=True):
    """The choice where one prompt is computed, with its reasons."""

    elsewhere: bool
    why: str
    prefill: Decision | None = None  # None: nowhere else was looked for
    here_s: float = 0.0  # time to the first token
    here_harm_s: float = 0.0  # that others wait, added up
    there_s: float = 0.0
    there_harm_s: float = 0.0
    transfer_s: float = 0.0  # part of `there_s`

    @property
    def replica(self) -> str | None:
        """The replica that would compute the prompt, if there is one."""
        return None if self.prefill is None or self.prefill.chosen is None else self.prefill.chosen.name

    @property
    def gain_s(self) -> float:
        return self.here_s + self.here_harm_s - self.there_s - self.there_harm_s

    @property
    def threshold_s(self) -> float:
        return max(LEAST_GAIN_S, LEAST_GAIN * (self.here_s + self.here_harm_s))


def why_not_at_all(mode: Mode, decode: Decision) -> str | None:
    """The reason why no prefill replica need be looked for; None if one may gain."""
    chosen = decode.chosen
    if mode == "never":
        return "prefill elsewhere is switched off"
    if chosen is None or chosen.role is None:
        return "its replica has no role, so it fetches no KV"
    uncached = decode.question.tokens - decode.question.matched.get(chosen.slot, 0)
    if mode == "auto" and uncached < LEAST_TOKENS:
        return f"only {uncached:,.0f} tokens are to be computed"
    return None


def split(mode: Mode, decode: Decision, prefill: Decision, transfers: Transfers) -> Split:
    """Weigh the prompt at the replica chosen to generate against the one chosen to compute."""
    if prefill.chosen is None:
        return Split(False, "no prefill replica can take it", prefill)
    here, there = _index(decode), _index(prefill)
    here_s, here_harm_s = decode.ttft_of(here), _harm_s(decode, here)
    transferred = decode.question.tokens - decode.question.matched.get(decode.candidates[here].slot, 0)
    reported = decode.candidates[here].load_tokens_per_s.get(PULL)
    transfer_s = transferred / (reported or transfers.tokens_per_s(decode.question.now_s))
    computed_s = prefill.ttft_of(there)
    left_s = decode.ahead(here) / decode.rates[here] - computed_s  # its last token waits for what is queued there
    there_s = computed_s + max(transfer_s, left_s) + OVERHEAD_S
    found = Split(False, "", prefill, here_s, here_harm_s, there_s, _harm_s(prefill, there), transfer_s)
    elsewhere = mode == "always" or found.gain_s > found.threshold_s
    return replace(found, elsewhere=elsewhere, why=_words(mode, found))


def _index(decision: Decision) -> int:
    assert decision.chosen is not None, "its caller has looked"
    return decision.candidates.index(decision.chosen)


def _harm_s(decision: Decision, index: int) -> float:
    """Seconds that answers in progress wait for the prompt, added up: steps with a prompt's part take its time."""
    one = decision.candidates[index]
    if one.role == "prefill":
        return 0.0  # it generates nothing: requests there wait in its queue
    return max(one.running, one.all_in_flight) * decision.uncached_of(index) / decision.rates[index]


def _words(mode: Mode, found: Split) -> str:
    gain_s, threshold_s = found.gain_s, found.threshold_s
    if gain_s > threshold_s:
        return f"saves {gain_s:.2f} s of waiting, more than {threshold_s:.2f} s"
    said = f"would save {gain_s:.2f} s" if gain_s > 0 else f"would cost {-gain_s:.2f} s more"
    return f"{said}, and has to save {threshold_s:.2f} s" + ("; told to do so always" if mode == "always" else "")


# ---- the second half


def fetch(question: Question, candidates: Sequence[Candidate], source: Candidate | None) -> None:
    """Count the prompt's KV as a neighbour's, for all candidates that can bring it from there.

    A replica of ours is read like any neighbour; from another engine, candidates with roles fetch it.
    """
    if source is not None and source.kv_read:
        question.source = source
        return
    question.is_fetched = True
    fetched: dict[int, float] = {one.slot: question.tokens for one in candidates if one.role is not None}
    question.below = {**question.below, PULL: fetched}


def fetches(question: Question, candidate: Candidate) -> bool:
    """Tell whether this replica, if it is chosen, fetches the prompt's KV instead of computing it."""
    return question.is_fetched and candidate.role is not None
