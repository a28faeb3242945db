"""Usage by day, key and model: what is counted, and the counts since the last time that they were saved."""

from collections.abc import Collection, Iterable, Iterator
from datetime import UTC, date, datetime, timedelta

from msgspec import Struct
from msgspec.structs import astuple

from router.placement.classes import ServiceClass
from router.tenants.limits import DAY_S

MOST_ROWS = 50_000  # in memory; more are counted as one row of the day
NO_KEY = "(none)"  # clients without a key
OTHERS = "(others)"
EPOCH = date(1970, 1, 1)
PLACE = ("day", "key", "model")  # of a row


class Counts(Struct):
    requests: int = 0
    client_errors: int = 0  # answered with a status of 400 to 499
    server_errors: int = 0  # with 500 and above, or broken off
    computed_tokens: int = 0  # of prompts
    cached_tokens: int = 0  # of prompts
    generated_tokens: int = 0
    first_tokens: int = 0  # requests of which the first token came
    first_token_s: float = 0.0  # the times until it came, added up
    saved_s: float = 0.0  # of prefill, by the cache

    def add(self, other: "Counts") -> None:
        """Add each of the counts."""
        self.requests += other.requests
        self.client_errors += other.client_errors
        self.server_errors += other.server_errors
        self.computed_tokens += other.computed_tokens
        self.cached_tokens += other.cached_tokens
        self.generated_tokens += other.generated_tokens
        self.first_tokens += other.first_tokens
        self.first_token_s += other.first_token_s
        self.saved_s += other.saved_s

    @property
    def tokens(self) -> int:
        return self.computed_tokens + self.cached_tokens + self.generated_tokens


COUNTED = Counts.__struct_fields__


class Row(Struct):
    day: str  # 2026-01-31, UTC
    key: str
    model: str
    counts: Counts

    @property
    def values(self) -> tuple[object, ...]:
        return (self.day, self.key, self.model, *astuple(self.counts))


class Selection(Struct, frozen=True):
    """Rows from one day to another, both included; None: of all keys or models."""

    first: str
    last: str
    key: str | None = None
    model: str | None = None
    by: tuple[str, ...] = PLACE  # a row for each of these, summed over the others

    def fits(self, row: Row) -> bool:
        return self.first <= row.day <= self.last and self.key in (None, row.key) and self.model in (None, row.model)


class Usage:
    """Counts by day, key and model. Models are those that are served, so there are few; keys are those of the file."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, str, str], Counts] = {}

    def __bool__(self) -> bool:
        return bool(self._counts)

    def counts(self, wall_s: float, key: str, model: str) -> Counts:
        """The counts of that day, to be added to."""
        place = int(wall_s // DAY_S), key, model
        return self._counts.get(place) or self._begun(place)

    def add_all(self, other: "Usage") -> None:
        for place, counts in other._counts.items():
            (self._counts.get(place) or self._begun(place)).add(counts)

    def _begun(self, place: tuple[int, str, str]) -> Counts:
        if len(self._counts) >= MOST_ROWS:
            place = (place[0], OTHERS, OTHERS)
        return self._counts.setdefault(place, Counts())

    def forget(self, today: int, days: int) -> None:
        """Forget the days that are older than so many, of which as many later ones are known, as the file does."""
        over = sorted({day for day, _, _ in self._counts if day < today})
        kept = min(today - days + 1, over[-days]) if len(over) > days else 0
        for place in [place for place in self._counts if place[0] < kept]:
            del self._counts[place]

    def rows(self) -> Iterator[Row]:
        for (day, key, model), counts in list(self._counts.items()):  # others may count meanwhile
            yield Row(day_text(day), key, model, counts)


def merged(rows: Iterable[Row], by: Collection[str] = PLACE) -> list[Row]:
    """Return one row for each day, key and model, in this order. Those that `by` does not name are empty."""
    by_day, by_key, by_model = (name in by for name in PLACE)
    found: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        place = row.day if by_day else "", row.key if by_key else "", row.model if by_model else ""
        if place in found:
            found[place].counts.add(row.counts)
        else:
            found[place] = Row(*place, Counts(*astuple(row.counts)))
    for row in found.values():  # without the noise of sums of floats
        row.counts.first_token_s = round(row.counts.first_token_s, 6)
        row.counts.saved_s = round(row.counts.saved_s, 6)
    return [found[place] for place in sorted(found)]


def day_text(day: int) -> str:
    """The date of a day that is counted from 1970."""
    return (EPOCH + timedelta(days=day)).isoformat()


def day_of(wall_s: float) -> date:
    return datetime.fromtimestamp(wall_s, UTC).date()


# ---- classes of service


class ClassCounts(Struct):
    answered: int = 0  # whose first token came
    late: int = 0  # of these, those whose first token came later than the class wants
    refused: int = 0  # as it could not be served in time


class ClassTotals:
    def __init__(self) -> None:
        self.by_name: dict[str, ClassCounts] = {}  # empty while there are no classes

    def answered(self, service: ServiceClass, first_token_s: float) -> None:
        counts = self.by_name.setdefault(service.name, ClassCounts())
        counts.answered += 1
        counts.late += first_token_s > service.first_token_s

    def refused(self, service: ServiceClass) -> None:
        self.by_name.setdefault(service.name, ClassCounts()).refused += 1
