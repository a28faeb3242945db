"""How the lines of a terminal are shared out among tables."""

from collections.abc import Sequence

LEAST = 3  # lines of a table that is worth drawing: titles, and two rows


def shared_out(lines: int, wishes: Sequence[int], weights: Sequence[int]) -> list[int]:
    """Who wishes for less than its share leaves the rest to the others; the last takes what nobody wants.

    Where not everybody can have LEAST, the last ones get nothing.
    """
    count = len(wishes)
    while count > 1 and lines < LEAST * count:
        count -= 1
    given = [0] * len(wishes)
    hungry = list(range(count))
    left = lines
    while hungry:
        whole = sum(weights[one] for one in hungry)
        content = [one for one in hungry if max(LEAST, wishes[one]) * whole <= left * weights[one]]
        if not content:
            break
        for one in content:
            given[one] = max(LEAST, wishes[one])
            hungry.remove(one)
        left = lines - sum(given)
    for place, one in enumerate(hungry):
        whole = sum(weights[other] for other in hungry[place:])
        after = LEAST * (len(hungry) - place - 1)
        given[one] = max(LEAST if lines >= LEAST else 0, min(left * weights[one] // whole, left - after))
        left -= given[one]
    given[count - 1] += max(0, lines - sum(given))
    return given
