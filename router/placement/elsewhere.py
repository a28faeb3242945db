"""A prompt's KV from elsewhere: read from neighbours that hold it, or computed by another replica for this one. Pure.

A neighbour can be read if it is up, says so, and keeps its blocks as the reader does. Its blocks count if events have
confirmed them in its GPU or host memory: neither those on their way there, nor those on its disk. Computing a prompt at
another replica than the one that generates its answer is a choice between two costs:

    here  = queue + prompt                          and every answer generated there waits for the prompt
    there = queue + prompt + transfer + OVERHEAD_S  and every answer generated there, where that replica does both

Both are in seconds that requests wait, added up, from the rates and queues of the two decisions. The prompt goes
elsewhere if that saves more than `threshold_s`: two requests instead of one, and estimates that may be wrong.
"""

from collections.abc import Mapping, Sequence
from heapq import nsmallest
from typing import Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from api.measured_rate import MeasuredRate
from router.placement.cost import NO_PULLS, Candidate, Neighbour, Pull, Question, saved_tokens
from router.placement.decision import Decision
from router.placement.prices import CPU, LEAST_PULLED_TOKENS, PULL, PULL_S, STORAGE, TOKENS_PER_S

# ---- reading from neighbours

MAX_NEIGHBOURS = 2  # the second is asked if the first fails


def add_pulls(question: Question, candidates: Sequence[Candidate], rates: Sequence[float]) -> None:
    """Find for each candidate what it would read from its neighbours."""
    question.pulls = _that_pay(question, candidates, rates) if question.readable else NO_PULLS
    source = question.source
    if source is None or source.unavailable is not None:
        return
    # It was computed there for the others; events may not have confirmed it yet.
    first = Neighbour(source.slot, source.name, source.kv_read, question.tokens)
    pulls = dict(question.pulls)
    for one in candidates:
        if one.slot != source.slot and can_read(one, source):
            known = pulls[one.slot].neighbours if one.slot in pulls else ()
            others = [each for each in known if each.slot != source.slot]
            pulls[one.slot] = Pull(question.tokens, (first, *others[: MAX_NEIGHBOURS - 1]))
    question.pulls = pulls


def can_read(reader: Candidate, source: Candidate) -> bool:
    return bool(reader.kv_read and source.kv_read) and reader.kv_layout == source.kv_layout


def _that_pay(question: Question, candidates: Sequence[Candidate], rates: Sequence[float]) -> Mapping[int, Pull]:
    """The pulls that cost less than computing."""
    by_layout = _holders(question, candidates)
    if not by_layout:
        return NO_PULLS
    holding = {one.slot for holders in by_layout.values() for one in holders}
    on_gpu, in_memory = question.matched.get, question.below.get(CPU, question.matched).get
    on_disk = question.below.get(STORAGE, question.matched).get
    pulls = {}
    for candidate, rate in zip(candidates, rates, strict=True):
        slot, holders = candidate.slot, by_layout.get(candidate.kv_layout)
        if holders is None or not candidate.kv_read:
            continue
        if slot in holding:
            holders = [one for one in holders if one.slot != slot]
        own = max(on_gpu(slot, 0), in_memory(slot, 0))
        if not holders or holders[0].tokens < own + LEAST_PULLED_TOKENS:
            continue
        first, *others = holders[:MAX_NEIGHBOURS]
        pull = Pull(first.tokens, (first, *(one for one in others if one.tokens >= own + LEAST_PULLED_TOKENS)))
        share = rate / (candidate.load_tokens_per_s.get(PULL) or TOKENS_PER_S[PULL])
        more = pull.tokens - max(own, on_disk(slot, 0))  # tokens that it would compute otherwise
        if share < 1.0 and (
            (1.0 - share) * more > PULL_S * rate
            or saved_tokens(question, candidate, rate, pull) > saved_tokens(question, candidate, rate, None)
        ):
            pulls[slot] = pull
    return pulls


def _holders(question: Question, candidates: Sequence[Candidate]) -> dict[str, list[Neighbour]]:
    """The replicas to be read, by layout; those with the most tokens first, and of these the least busy.

    One more than are named, as a reader may be one of them.
    """
    found: dict[str, list[tuple[float, int, int, Candidate]]] = {}
    readable, tried = question.readable.get, question.tried
    for one in candidates:
        tokens = readable(one.slot, 0)
        can_be_read = one.kv_read and one.kv_layout and one.unavailable is None and one.name not in tried
        if tokens >= LEAST_PULLED_TOKENS and can_be_read:
            found.setdefault(one.kv_layout, []).append((-tokens, one.all_in_flight, one.slot, one))
    return {
        layout: [Neighbour(slot, one.name, one.kv_read, int(-tokens)) for tokens, _, slot, one in best]
        for layout, holders in found.items()
        if (best := nsmallest(MAX_NEIGHBOURS + 1, holders))
    }


Mode: TypeAlias = Literal["auto", "always", "never"]

OVERHEAD_S = 0.02  # the price of a second request: it is parsed and scheduled again
LEAST_GAIN_S = 0.05
LEAST_GAIN = 0.2  # the least gain, as a share of the cost here
FORGET_S = 60.0
LEAST_TOKENS = 256  # a prompt with fewer to compute is never worth it: vLLM itself fetches no less than 64


class Transfers:
    """The speed at which KV has come from other replicas lately: tokens over seconds from sending to the first byte.

    It is forgotten when nothing new comes: transfers that seemed too slow are tried again.
    """

    __slots__ = ("_at_s", "_measured")

    def __init__(self) -> None:
        self._measured = MeasuredRate()
        self._at_s = 0.0  # the time of the last one

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
    here_harm_s: float = 0.0  # the seconds that others wait, added up
    there_s: float = 0.0
    there_harm_s: float = 0.0
    transfer_s: float = 0.0  # part of `there_s`

    @property
    def replica(self) -> str | None:
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
    left_s = decode.ahead(here) / decode.rates[here] - computed_s  # its last token waits for the queue there
    there_s = computed_s + max(transfer_s, left_s) + OVERHEAD_S
    found = Split(False, "", prefill, here_s, here_harm_s, there_s, _harm_s(prefill, there), transfer_s)
    gain_s, threshold_s = found.gain_s, found.threshold_s
    if gain_s > threshold_s:
        why = f"saves {gain_s:.2f} s of waiting, more than {threshold_s:.2f} s"
    else:
        why = f"would save {gain_s:.2f} s" if gain_s > 0 else f"would cost {-gain_s:.2f} s more"
        why += f", and has to save {threshold_s:.2f} s" + ("; told to do so always" if mode == "always" else "")
    return replace(found, elsewhere=mode == "always" or gain_s > threshold_s, why=why)


def _index(decision: Decision) -> int:
    assert decision.chosen is not None, "its caller has looked"
    return decision.candidates.index(decision.chosen)


def _harm_s(decision: Decision, index: int) -> float:
    """Seconds that answers in progress wait for the prompt, added up: steps with a prompt's part take its time."""
    one = decision.candidates[index]
    if one.role == "prefill":
        return 0.0  # it generates nothing: requests there wait in its queue
    return max(one.running, one.all_in_flight) * decision.uncached_of(index) / decision.rates[index]


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
