"""Templates that show the date, which a replica in another time zone may see another day.

Time zones are apart by multiples of a quarter of an hour, so a date changes nowhere within a quarter: a replica that
shows our date once shows it until the quarter ends. Around its ends nothing is known, as clocks are not quite equal.
"""

import re
from functools import lru_cache
from typing import Literal, TypeAlias

Shown: TypeAlias = Literal["nothing", "date", "time"]

QUARTER_S = 900
EDGE_S = 5  # clocks, and the times of making a prompt here and there, may differ by this
SHOWS_TIME = "its chat template shows the time, which differs from clock to clock"
SHOWS_DATE = "its chat template shows the date, which may be another one at the replica"
OTHER_DATE = "its chat template shows another date at a replica, as in another time zone"

_NAMED = re.compile(r"\bstrftime_now\b(?!\s+is\s)")
_FORMAT = re.compile(r"strftime_now\s*\(\s*(?:'([^'\\]*)'|\"([^\"\\]*)\")\s*\)")
_DIRECTIVE = re.compile(r"%[-_0^#]?(.?)")
_COARSE = frozenset("aAbBdejmyYuwUWGVDFxhCgHIlkpPnt%")  # formats that change with the hour or less often


@lru_cache(64)
def shown(template: str) -> Shown:
    """Return what a template shows of the present time."""
    formats = [one or other for one, other in _FORMAT.findall(template)]
    if len(formats) < len(_NAMED.findall(template)):
        return "time"
    directives = {each for format in formats for each in _DIRECTIVE.findall(format)}
    return "time" if directives - _COARSE else "date" if formats else "nothing"


def quarter(at_s: float) -> int | None:
    """Number the quarters of an hour; None where the next one is near."""
    number, within = divmod(at_s, QUARTER_S)
    return int(number) if EDGE_S <= within < QUARTER_S - EDGE_S else None
