"""Pieces of an answer, drawn by hypothesis: thoughts, text, and calls in two parts."""

from typing import Any

from hypothesis import strategies as st

from api.parsing.parsed import CallDelta, Parsed

_NO_CALLS: Any = st.just(())
_TEXT = st.text(max_size=3)
_NOTHING = st.just("")
_CALL = "call"


def _numbered(drawn: list[Parsed | str]) -> list[Parsed]:
    pieces: list[Parsed] = []
    for number, piece in enumerate(drawn):
        if isinstance(piece, Parsed):
            pieces.append(piece)
        else:
            pieces.append(Parsed(calls=(CallDelta(number, f"c{number}", "f", '{"n":'),)))
            pieces.append(Parsed(calls=(CallDelta(number, f"c{number}", None, f"{number}}}"),)))
    return pieces


def pieces(*, both: bool) -> st.SearchStrategy[list[Parsed]]:
    """Some pieces; `both`: one may have thoughts and text."""
    kinds = [(_TEXT, _NOTHING), (_NOTHING, _TEXT), *[(_TEXT, _TEXT)] * both]
    built = [st.builds(Parsed, reasoning=thought, content=text, calls=_NO_CALLS) for thought, text in kinds]
    return st.lists(st.one_of(*built, st.just(_CALL)), max_size=8).map(_numbered)
