"""Explanations of wrong predictions, from made-up batches of an engine."""

from events.messages import BlockRemoved, BlockStored, Event, EventBatch
from qualification.engines.engine import Found
from qualification.engines.explain import Explanation, Kind, Wrong, explain

SIZE = 4
PROMPT = list(range(100, 118))  # four blocks and a half
DECIDED_S = 1000.0


def stored(first: int, until: int) -> BlockStored:
    """An event for these blocks of the prompt; a block's hash is its number."""
    tokens = PROMPT[first * SIZE : until * SIZE]
    parent = first - 1 if first else None
    return BlockStored(list(range(first, until)), parent, tokens, SIZE, None, "GPU", None)


def removed(*blocks: int) -> BlockRemoved:
    return BlockRemoved(list(blocks), "GPU")


def batch(after_s: float, *events: Event) -> EventBatch:
    """A batch that was published so long after the decision."""
    return EventBatch(DECIDED_S + after_s, list(events))


def wrong(predicted: int, found: int, seq: int) -> Wrong:
    """A prediction and a finding, in blocks, by a router that knew the batches up to this one."""
    finding = Found("req-1", found * SIZE, prompt=PROMPT)
    return Wrong("req-1", finding, predicted * SIZE, SIZE, seq, DECIDED_S, DECIDED_S + 0.1)


def explained(one: Wrong, *batches: EventBatch) -> Explanation:
    [explanation] = explain([one], batches)
    return explanation


def test_a_removal_after_the_decision_explains_a_shorter_hit() -> None:
    one = explained(wrong(4, 3, seq=0), batch(-1, stored(0, 4)), batch(0.002, removed(3)))
    assert one.kind is Kind.LATER
    assert str(one) == (
        "req-1: predicted 16, found 12: explained by an event published after the decision: "
        "BlockRemoved in batch 1, 2.0 ms after the decision; the router knew batch 0"
    )


def test_a_store_that_the_router_has_not_read_yet_explains_a_longer_hit() -> None:
    one = explained(wrong(2, 4, seq=0), batch(-1, stored(0, 2)), batch(-0.002, stored(2, 4)))
    assert one.kind is Kind.UNDER_WAY
    assert "BlockStored in batch 1, 2.0 ms before the decision" in str(one)


def test_a_moment_between_two_events_of_a_batch_explains_too() -> None:
    last = batch(0.002, removed(3), removed(2))
    assert explained(wrong(4, 3, seq=0), batch(-1, stored(0, 4)), last).kind is Kind.LATER


def test_events_that_lead_to_no_such_hit_explain_nothing() -> None:
    one = explained(wrong(4, 1, seq=0), batch(-1, stored(0, 4)), batch(0.002, removed(3)))
    assert one.kind is Kind.NONE


def test_an_event_long_after_the_answer_explains_nothing() -> None:
    one = explained(wrong(4, 3, seq=0), batch(-1, stored(0, 4)), batch(60, removed(3)))
    assert one.kind is Kind.NONE


def test_a_prediction_that_the_events_known_then_do_not_give_is_not_explained() -> None:
    one = explained(wrong(4, 3, seq=0), batch(-1, stored(0, 2)), batch(0.002, stored(2, 3)))
    assert one.kind is Kind.NONE
    assert "the events up to batch 0 predict 8" in str(one)
