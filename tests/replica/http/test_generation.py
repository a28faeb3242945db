"""Tokens to text: the same however they arrive, and the same after a move to another replica."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.tokens.tokenizer import ByteTokenizer
from replica.http.generation import Choice, Delta, StopConditions
from replica.messages import TokenLogprobs

TOKENIZER = ByteTokenizer()
EOS = TOKENIZER.eos


def choice(**ending: object) -> Choice:
    settings = {"max_tokens": 1000, "stop_token_ids": frozenset({EOS})} | ending
    return Choice(0, StopConditions(**settings), TOKENIZER)  # type: ignore[arg-type]


def ids(text: str) -> list[int]:
    return list(text.encode())


def text_of(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def fed_one_by_one(grown: Choice, token_ids: Sequence[int], reason: str | None) -> list[Delta]:
    last = len(token_ids) - 1
    return [grown.feed([token], reason if place == last else None) for place, token in enumerate(token_ids)]


def test_the_token_that_stops_is_counted_and_not_shown() -> None:
    grown = choice(skip_special_tokens=False)
    delta = grown.feed([*ids("hi"), EOS], "stop")
    assert (delta.text, delta.finish_reason, grown.completion_tokens, grown.stop_token) == ("hi", "stop", 3, EOS)


def test_the_token_that_stops_is_shown_on_request() -> None:
    grown = choice(stop_token_ids=frozenset({ord("!")}), show_stop=True)
    assert grown.feed(ids("hi!"), "stop").text == "hi!"


def test_a_stop_string_ends_the_choice_and_what_comes_after_is_ignored() -> None:
    grown = choice(stop_strings=("END",))
    delta = grown.feed(ids("oneENDtwo"))
    assert (delta.text, delta.finish_reason, list(delta.token_ids)) == ("one", "stop", ids("oneEND"))
    assert grown.feed(ids("more"), "length") == Delta("", ())
    assert (grown.completion_tokens, grown.stop_string) == (6, "END")


def test_a_stop_string_within_min_tokens_does_not_stop() -> None:
    grown = choice(stop_strings=("b",), min_tokens=2)
    assert grown.feed(ids("abab")).text == "aba"
    assert grown.completion_tokens == 4


def test_logprobs_go_with_their_tokens_and_end_with_the_stop_string() -> None:
    grown = choice(stop_strings=("b",))
    logprobs = [TokenLogprobs(-float(place), []) for place in range(3)]
    delta = grown.feed(ids("abc"), None, logprobs)
    assert (list(delta.logprobs), list(delta.offsets)) == (logprobs[:2], [0, 1])


@pytest.mark.parametrize(
    ("said", "reason"),
    [([*ids("ab"), EOS], "stop"), (ids("abcd"), "length"), (ids("aEND"), "stop"), (ids("abc"), None)],
)
def test_resuming_finds_the_end_that_was_reached_already(said: list[int], reason: str | None) -> None:
    grown = choice(max_tokens=4, stop_strings=("END",))
    assert grown.resume(said).finish_reason == reason
    assert grown.completion_tokens == len(said)


STOPS = st.lists(st.text("abé€", min_size=1, max_size=4), max_size=2).map(tuple)
TEXTS = st.text("abé€😀", max_size=20)


@given(TEXTS, STOPS, st.booleans(), st.integers(0, 6), st.sampled_from(["stop", "length"]), st.data())
def test_the_text_does_not_depend_on_the_cuts(
    text: str, stops: tuple[str, ...], show: bool, min_tokens: int, reason: str, data: st.DataObject
) -> None:
    end = data.draw(st.integers(0, len(ids(text))), label="end")  # maybe inside a character
    tokens = [*ids(text)[:end], EOS if reason == "stop" else ord("z")]

    def fresh() -> Choice:
        return choice(stop_strings=stops, show_stop=show, min_tokens=min_tokens)

    whole, single = fresh(), fresh()
    at_once = whole.feed(tokens, reason)
    pieces = fed_one_by_one(single, tokens, reason)
    assert text_of(pieces) == at_once.text
    assert (whole.finish_reason, whole.completion_tokens) == (single.finish_reason, single.completion_tokens)
    assert [offset for piece in pieces for offset in piece.offsets] == list(at_once.offsets)


@given(TEXTS, STOPS, st.booleans(), st.integers(0, 6), st.data())
def test_a_resumed_choice_says_exactly_what_was_still_to_be_said(
    text: str, stops: tuple[str, ...], show: bool, min_tokens: int, data: st.DataObject
) -> None:
    tokens = [*ids(text), EOS]
    settings = {"stop_strings": stops, "show_stop": show, "min_tokens": min(min_tokens, len(tokens))}
    original = choice(**settings)
    deltas = fed_one_by_one(original, tokens, "stop")
    cut = data.draw(st.integers(0, len(tokens)), label="cut")

    resumed = choice(**settings)
    said = resumed.resume(tokens[:cut])
    rest = [] if resumed.finish_reason else fed_one_by_one(resumed, tokens[cut:], "stop")
    assert said.text == text_of(deltas[:cut])
    assert text_of(rest) == text_of(deltas[cut:])
    assert (resumed.finish_reason, resumed.completion_tokens) == (original.finish_reason, original.completion_tokens)
