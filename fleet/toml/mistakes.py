"""A mistake in a fleet.toml: what is wrong, and where."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches


class Mistake(ValueError):
    """`where`: the keys that lead to it."""

    def __init__(self, message: str, *where: str | int) -> None:
        super().__init__(message)
        self.where = where


@contextmanager
def within(*where: str | int) -> Iterator[None]:
    """Say of the mistakes of a table where that table is."""
    try:
        yield
    except Mistake as error:
        raise Mistake(str(error), *where, *error.where) from error


def shown(value: object) -> str:
    """Return a value as TOML writes it, cut if it is long."""
    text = str(value).lower() if isinstance(value, bool) else repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def nearest(key: str, known: Sequence[str], otherwise: str) -> str:
    near = get_close_matches(key, known, n=1)
    return f"did you mean {near[0]!r}?" if near else otherwise
