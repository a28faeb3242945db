"""Divergence of texts and its cost, compared with a model that works one letter at a time."""

from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from lab.analysis.breaks.prompts import (
    AFTER,
    BEFORE,
    STRIDE,
    Piece,
    Prompt,
    common,
    computed_letters,
    example_of,
)

letters = st.text("ab", max_size=6)
long = st.tuples(st.integers(0, 3 * STRIDE), letters).map(lambda each: "x" * each[0] + each[1])
pieces = st.lists(st.builds(Piece, st.sampled_from(["user", "system"]), letters), max_size=4).map(tuple)


def prompt(rest: tuple[Piece, ...], salt: str | None = None) -> Prompt:
    return Prompt("r", "m", None, salt, (), (), rest, 1)


def dumb_common(texts: list[str]) -> int:
    columns = zip(*texts, strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


@given(long, long)
def test_the_common_beginning_is_the_longest(one: str, other: str) -> None:
    assert common(one, other) == common(other, one) == dumb_common([one, other])


@given(long, long)
def test_an_example_holds_both_variants_after_the_same_text(one: str, other: str) -> None:
    example = example_of(one, other)
    assert one.startswith(one[: common(one, other)])
    assert len(example.before) <= BEFORE and max(len(example.one), len(example.other)) <= AFTER
    assert example.before + example.one in one and example.before + example.other in other
    assert one == other or example.one[:1] != example.other[:1]


@given(st.lists(st.tuples(pieces, st.sampled_from([None, "salt"])), max_size=6))
def test_letters_are_computed_once_for_each_beginning(made: list[tuple[tuple[Piece, ...], str | None]]) -> None:
    """A beginning: salt, whole pieces, and letters of the next, which has the same role."""
    beginnings = {
        (salt, rest[:at], rest[at].role, rest[at].text[: stop + 1])
        for rest, salt in made
        for at in range(len(rest))
        for stop in range(len(rest[at].text))
    }
    assert computed_letters(prompt(rest, salt) for rest, salt in made) == len(beginnings)
