"""Passages: the same text for the same name, nearly the wanted length, and nothing shared by chance."""

from hypothesis import given
from hypothesis import strategies as st

from lab.bench.prompts import Words
from lab.bench.workloads import Passage

PASSAGES = st.lists(st.builds(Passage, st.text(max_size=8), st.integers(0, 3000)), max_size=20)
WORDS_OF_1 = Words("1")


def test_another_seed_or_name_says_something_else_from_the_first_words_on() -> None:
    said = {words.text([Passage(str(name), 3)]) for words in map(Words, "123") for name in range(200)}
    assert len(said) == 600


@given(PASSAGES, st.sampled_from([(per_word, Words("1", per_word)) for per_word in (0.3, 1.0, 1.37, 5.0)]))
def test_a_text_has_the_words_that_its_tokens_come_to(passages: list[Passage], made: tuple[float, Words]) -> None:
    tokens_per_word, words = made
    tokens = sum(passage.tokens for passage in passages)
    assert len(words.text(passages).split()) == round(tokens / tokens_per_word)


@given(st.text(max_size=8), st.integers(0, 3000), st.integers(0, 3000))
def test_a_passage_cut_short_is_the_beginning_of_the_longer_one(name: str, one: int, other: int) -> None:
    short, long = sorted((one, other))
    assert WORDS_OF_1.text([Passage(name, long)]).startswith(WORDS_OF_1.text([Passage(name, short)]))
