"""Pieces of an answer, drawn by hypothesis: thoughts, text, and calls in two parts."""

from typing import Any

from hypothesis import strategies as st

from api.parsing.parsed import CallDelta, Parsed

_NO_CALLS: Any = st.just(())
_TEXT = st.text(max_size=3)
_NOTHING = st.just("")
_CALLS = {"f": ('{"n":', "1}"), "patch": ('{"input": "a', '\\n"}')}  # arguments by function, in two parts


def _numbered(drawn: list[Parsed | str]) -> list[Parsed]:
    pieces: list[Parsed] = []
    for number, piece in enumerate(drawn):
        if isinstance(piece, Parsed):
            pieces.append(piece)
        else:
            first, rest = _CALLS[piece]
            pieces.append(Parsed(calls=(CallDelta(number, f"c{number}", piece, first),)))
            pieces.append(Parsed(calls=(CallDelta(number, f"c{number}", None, rest),)))
    return pieces


def pieces(*, both: bool) -> st.SearchStrategy[list[Parsed]]:
    """Some pieces, with calls of `f` and of `patch`; `both`: one may have thoughts and text."""
    kinds = [(_TEXT, _NOTHING), (_NOTHING, _TEXT), *[(_TEXT, _TEXT)] * both]
    built = [st.builds(Parsed, reasoning=thought, content=text, calls=_NO_CALLS) for thought, text in kinds]
    return st.lists(st.one_of(*built, st.sampled_from(list(_CALLS))), max_size=8).map(_numbered)
