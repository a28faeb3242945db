"""Reading from neighbours: for each replica, those that hold more of a prompt, where reading beats computing.

A neighbour can be read if it is up, says so, and keeps its blocks as the reader does. Its blocks count if events have
confirmed them in its GPU or host memory: neither those on their way there, nor those on its disk.
"""

from collections.abc import Mapping, Sequence
from heapq import nsmallest

from router.placement.cost import NO_PULLS, Candidate, Neighbour, Pull, Question, saved_tokens
from router.placement.prices import CPU, LEAST_PULLED_TOKENS, PULL, PULL_S, STORAGE, TOKENS_PER_S

MOST_NEIGHBOURS = 2  # the second is asked if the first fails


def add_pulls(question: Question, candidates: Sequence[Candidate], rates: Sequence[float]) -> None:
    """Find for each candidate what it would read from its neighbours."""
    question.pulls = _that_pay(question, candidates, rates) if question.readable else NO_PULLS
    if question.source is not None:
        question.pulls = {**question.pulls, **_from_source(question, question.source, candidates)}


def can_read(reader: Candidate, source: Candidate) -> bool:
    """Return whether one replica can use the blocks of another one."""
    return bool(reader.kv_read and source.kv_read) and reader.kv_layout == source.kv_layout


def _from_source(question: Question, source: Candidate, candidates: Sequence[Candidate]) -> dict[int, Pull]:
    """The pulls from where the prompt was computed for the others; events may not have confirmed it yet."""
    if source.unavailable is not None:
        return {}
    first, before = Neighbour(source.slot, source.name, source.kv_read, question.tokens), question.pulls
    pulls = {}
    for one in candidates:
        if one.slot != source.slot and can_read(one, source):
            known = before[one.slot].neighbours if one.slot in before else ()
            others = [each for each in known if each.slot != source.slot]
            pulls[one.slot] = Pull(question.tokens, (first, *others[: MOST_NEIGHBOURS - 1]))
    return pulls


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
        pull = _pull(holders, own)
        share = rate / (candidate.load_tokens_per_s.get(PULL) or TOKENS_PER_S[PULL])
        more = pull.tokens - max(own, on_disk(slot, 0))  # that it would compute otherwise; that is often enough
        if share < 1.0 and ((1.0 - share) * more > PULL_S * rate or _pays(question, candidate, rate, pull)):
            pulls[slot] = pull
    return pulls


def _pull(holders: Sequence[Neighbour], own: float) -> Pull:
    first, *others = holders[:MOST_NEIGHBOURS]
    return Pull(first.tokens, (first, *(one for one in others if one.tokens >= own + LEAST_PULLED_TOKENS)))


def _pays(question: Question, candidate: Candidate, rate: float, pull: Pull) -> bool:
    """Return whether reading saves more than it costs."""
    return saved_tokens(question, candidate, rate, pull) > saved_tokens(question, candidate, rate, None)


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
        if (best := nsmallest(MOST_NEIGHBOURS + 1, holders))
    }
