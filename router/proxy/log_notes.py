"""Notes of a running request for its line in the request log."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from router.log_lines import Decided, Weighed
from router.placement.cost import INFINITE

if TYPE_CHECKING:
    from router.members.feeds import Feeds
    from router.members.members import Member
    from router.placement.cost import Question
    from router.placement.decision import Decision


class Notes:
    """Data of one request, gathered while it runs."""

    __slots__ = ("body", "decisions")

    def __init__(self) -> None:
        self.body = b""
        self.decisions: list[Decided] = []

    def decided(self, order: int, decision: "Decision", members: Sequence["Member"], feeds: "Feeds") -> None:
        """Record a decision; call it before the load changes."""
        question = decision.question
        lost = decision.effects.lost if decision.effects is not None else [0.0] * len(members)
        self.decisions.append(
            Decided(
                order,
                question.now_s,
                decision.policy,
                decision.tie_break,
                question.turn,
                None if decision.chosen is None else decision.chosen.name,
                sorted(question.tried),
                [
                    _weighed(member, cost, question, feeds, lost_tokens)
                    for member, cost, lost_tokens in zip(members, decision.costs, lost, strict=True)
                ],
                question.came_s,
                question.half,
                question.is_fetched,
                None if question.source is None else question.source.name,
                question.behind_s,
                question.stands_back,
            )
        )


def _weighed(member: "Member", cost: float, question: "Question", feeds: "Feeds", lost_tokens: float | None) -> Weighed:
    """The figures of one replica. Positional, for speed: it runs for every replica and request if a log is kept."""
    candidate, load, slot = member.candidate, member.load, member.slot
    matched = question.matched.get(slot, 0)
    below = {source: level[slot] for source, level in question.below.items() if slot in level}
    lower, pull = max(below.values(), default=0), question.pulls.get(slot)
    known = feeds.known(member.name)
    seq, inexact = (None, None) if known is None else known
    return Weighed(
        candidate.name,
        None if cost == INFINITE else cost,
        matched,
        lower if lower > matched else None,
        candidate.queued_tokens,
        candidate.running,
        candidate.waiting,
        candidate.all_in_flight,
        candidate.prefill_tokens_per_s,
        candidate.empty_tokens,
        candidate.assigned_tokens,
        candidate.slowness,
        candidate.unavailable,
        candidate.may_try_anyway,
        candidate.limit,
        candidate.max_model_len,
        member.block_size,
        load.block_size,
        load.total_blocks,
        seq,
        inexact,
        member.report,
        lost_tokens or 0.0,
        member.trust,
        below,
        dict(candidate.load_tokens_per_s),
        candidate.kv_layout,
        question.readable.get(slot, 0),
        0 if pull is None else pull.tokens,
        [] if pull is None else [one.name for one in pull.neighbours],
        candidate.role,
    )
