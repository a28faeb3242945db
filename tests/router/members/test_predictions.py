"""Differences between predictions and reports: explained by later events, or wrong."""

from typing import Any, cast

import pytest

from router.members.feed import Moment
from router.members.predictions import MAX_OPEN, Accuracy, Predictions
from router.placement.decision import Prediction

KEYS = list(range(100, 110))
EXACT, PARTIAL = Moment(0, 5, True), Moment(0, 5, False)


class Feed:
    """Changes since the prediction, by key."""

    def __init__(self) -> None:
        self.stored: dict[int, bool | None] = {}
        self.removed: dict[int, bool | None] = {}
        self.settled = True
        self.groups = False
        self.finds: list[list[int]] = []

    def has_changed(self, _since: Moment, keys: list[int], *, stored: bool) -> bool | None:
        changed = [(self.stored if stored else self.removed).get(key, False) for key in keys]
        return None if None in changed else any(changed)

    @property
    def has_groups(self) -> bool:
        return self.groups

    def is_settled(self, _since_s: float) -> bool:
        return self.settled

    def found(self, _since: Moment, keys: list[int], *, sure: bool) -> None:
        assert not sure
        self.finds.append(keys)


class Books:
    def __init__(self) -> None:
        self.feed = Feed()
        self.accuracy = Accuracy()
        self.wrong: list[str] = []
        self.it = Predictions(self.wrong.append)

    def compare(self, predicted: int, reported: int, *, claimed: int | None = None, since: Moment = EXACT) -> None:
        claimed = predicted if claimed is None else claimed
        made = Prediction(16, predicted, claimed, sure=claimed == predicted)
        self.it.compare("r", self.accuracy, cast(Any, self.feed), made, since, reported, KEYS, 10.0)

    def settled(self, predicted: int, reported: int) -> tuple[int, int, int]:
        """The counts once a difference has been judged."""
        self.compare(predicted, reported)
        self.it.settle(10.6)
        return self.counts

    @property
    def counts(self) -> tuple[int, int, int]:
        return self.accuracy.compared, self.accuracy.explained, self.accuracy.different


@pytest.mark.parametrize(
    ("prediction", "reported", "explained"),
    [
        (Prediction(16, 9, 9, False, brought_blocks=5), 4, True),  # nothing came from host memory or disk
        (Prediction(16, 9, 9, False, brought_blocks=5), 7, True),
        (Prediction(16, 9, 9, False, brought_blocks=5), 3, False),  # of those in GPU memory
        (Prediction(16, 9, 9, False, brought_blocks=5), 10, False),
        (Prediction(16, 4, 4, False, pulls=True), 9, True),  # five came from a neighbour
        (Prediction(16, 4, 4, False, pulls=True), 3, False),
    ],
)
def test_blocks_that_are_to_be_brought_explain_a_difference(
    prediction: Prediction, reported: int, explained: bool
) -> None:
    books = Books()
    books.it.compare("r", books.accuracy, cast(Any, books.feed), prediction, EXACT, reported, KEYS, 10.0)
    books.it.settle(10.6)
    assert books.counts == ((1, 1, 0) if explained else (1, 0, 1))
    assert not books.wrong


def test_equal_blocks_are_counted_at_once() -> None:
    books = Books()
    books.compare(3, 3)
    assert books.counts == (1, 0, 0)


def test_a_difference_without_an_explanation_is_wrong_once_the_events_have_come() -> None:
    books = Books()
    books.compare(3, 1)
    books.it.settle(10.1)
    assert books.counts == (0, 0, 0)
    books.feed.settled = False  # nothing has been heard since
    books.it.settle(10.6)
    assert books.counts == (0, 0, 0)
    books.feed.settled = True
    books.it.settle(11.2)
    assert books.counts == (1, 0, 1)
    assert books.wrong == ["r"]


def test_a_block_evicted_before_its_event_came_explains_fewer_blocks() -> None:
    books = Books()
    books.feed.removed[KEYS[1]] = True
    assert books.settled(3, 1) == (1, 1, 0)
    assert books.accuracy.recent == 1.0


def test_a_block_stored_before_its_event_came_explains_more_blocks() -> None:
    books = Books()
    books.feed.stored[KEYS[1]] = True
    assert books.settled(1, 3) == (1, 1, 0)


def test_another_block_explains_nothing() -> None:
    books = Books()
    books.feed.removed[KEYS[2]] = books.feed.stored[KEYS[1]] = True
    assert books.settled(3, 1) == (1, 0, 1)


def test_with_groups_any_of_the_blocks_that_were_found_may_explain_it() -> None:
    books = Books()
    books.feed.groups, books.feed.removed[KEYS[2]] = True, True
    assert books.settled(3, 1) == (1, 1, 0)


def test_blocks_that_were_only_hoped_for_are_no_wrong_claim() -> None:
    books = Books()
    books.compare(5, 3, claimed=2)
    books.compare(5, 1, claimed=2)  # less than its events claim
    books.it.settle(10.6)
    assert books.counts == (2, 1, 1)
    assert books.wrong == []  # it was not sure of it


def test_after_a_new_start_of_the_index_nothing_is_judged() -> None:
    books = Books()
    books.feed.stored[KEYS[1]] = None
    assert books.settled(1, 3) == (0, 0, 0)


def test_an_index_that_was_not_exact_claims_nothing_and_learns() -> None:
    books = Books()
    books.compare(1, 3, since=PARTIAL)
    books.it.settle(20.0)
    assert books.counts == (0, 0, 0)
    assert books.feed.finds == [KEYS[:3]]


def test_a_replica_that_fell_silent_is_not_judged() -> None:
    books = Books()
    books.feed.settled = False
    books.compare(3, 1)
    for half_seconds in range(40):
        books.it.settle(10.0 + half_seconds / 2)
    assert books.counts == (0, 0, 0)


@pytest.mark.parametrize("reported", [1, 7])
def test_open_differences_are_bounded(reported: int) -> None:
    books = Books()
    for _ in range(3 * MAX_OPEN):
        books.compare(3, reported)
    books.it.settle(10.6)
    assert books.accuracy.compared == MAX_OPEN


def test_a_claim_that_events_explain_is_no_lie_and_any_other_is() -> None:
    for explained in (True, False):
        books = Books()
        books.feed.removed[KEYS[0]] = explained
        for _ in range(40):
            books.settled(3, 0)
        assert books.accuracy.trust == 0.0, "it gets fewer requests in either case"
        assert books.accuracy.honesty == (1.0 if explained else 0.0)
        for _ in range(40):
            books.compare(3, 3)
        assert books.accuracy.honesty == 1.0


def test_a_liar_that_says_nothing_more_is_not_excused_by_its_silence() -> None:
    books = Books()
    books.feed.settled = False
    for _ in range(40):
        books.compare(3, 0)
    books.it.settle(10.6)
    assert books.accuracy.honesty == 1.0
    books.it.settle(30.0)
    assert books.accuracy.honesty == 0.0


def test_a_cache_that_was_read_again_since_proves_no_lie() -> None:
    books = Books()
    books.feed.removed[KEYS[0]] = None
    for _ in range(40):
        books.settled(3, 0)
    assert books.accuracy.honesty == 1.0
