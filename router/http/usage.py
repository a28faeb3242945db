"""GET /usage: requests and tokens by key, model and day, as JSON or CSV."""

import asyncio
import csv
import io
from collections.abc import Collection, Sequence
from datetime import date, timedelta
from heapq import nlargest
from itertools import chain
from time import time

import msgspec
from msgspec.structs import asdict, astuple
from starlette.datastructures import QueryParams
from starlette.responses import Response

from api.errors import ApiError, invalid, quoted
from router.tenants.admission import Admitted
from router.tenants.ledger import Ledger
from router.tenants.usage import COUNTED, NO_KEY, PLACE, Row, Selection, day_of, merged
from router.workers.colleagues import Colleagues
from router.workers.questions import USAGE

USUAL_DAYS = 30
MAX_ROWS = 100_000  # the most rows of an answer
FORMATS = ("json", "csv")
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # how a cell begins that a spreadsheet would compute


async def usage_answer(
    ledger: Ledger, colleagues: Colleagues | None, query: QueryParams, limit: int, admitted: Admitted
) -> Response:
    """The usage of all keys for an administrator, and for any other client that of its own key.

    Of more rows than `limit`, those with the most tokens.
    """
    wanted = selection(query, admitted, day_of(time()))
    kind = query.get("format", "json")
    if kind not in FORMATS:
        raise invalid(f"format is {quoted(kind)}; write json or csv", "format")
    others: list[list[Row]] = []
    if colleagues is None:
        await ledger.save()
    else:  # first each worker saves what it has, so that nothing is in two places
        told, _ = await asyncio.gather(colleagues.told(USAGE, wanted), ledger.save())
        others = list(told.values())
    saved = await ledger.saved(wanted, MAX_ROWS + 1)
    rows = await asyncio.to_thread(merged, chain(saved, await ledger.unsaved(wanted), *others), wanted.by)
    if len(rows) > MAX_ROWS:
        raise invalid(f"that is more than {MAX_ROWS:,} rows; choose fewer days, a key or a model", "from")
    left_out = max(0, len(rows) - limit)
    if left_out:
        rows = nlargest(limit, rows, key=lambda row: row.counts.tokens)
    if kind == "csv":
        return Response(await asyncio.to_thread(as_csv, rows, wanted.by), media_type="text/csv; charset=utf-8")
    about: dict[str, object] = {
        "from": wanted.first,
        "to": wanted.last,
        "kept_in": "memory" if ledger.file is None else "file",
        "since": ledger.since.isoformat() if ledger.file is None else None,
        "problem": ledger.problem if admitted.admin else None,
        "left_out": left_out,
    }

    def as_json() -> bytes:
        return msgspec.json.encode(about | {"usage": [_place(row, wanted.by) | asdict(row.counts) for row in rows]})

    return Response(await asyncio.to_thread(as_json), media_type="application/json")


def selection(query: QueryParams, admitted: Admitted, today: date) -> Selection:
    """The rows that are asked for; raise ApiError if the client may not see them."""
    last = _day(query, "to", today)
    first = _day(query, "from", last - timedelta(days=USUAL_DAYS - 1))
    if first > last:
        raise invalid(f"from is {first}, which is after {last}; write the earlier day first", "from")
    key, model = query.get("key"), query.get("model")
    if key == NO_KEY:
        key = ""
    if not admitted.admin:
        own = admitted.key
        if own is None or key not in (None, own.name):
            message = "a client sees only the usage of its own API key; send the admin key to see others"
            raise ApiError(403, message, code="admin_key_required")
        key = own.name
    text = query.get("by", ",".join(PLACE))
    names = text.split(",")
    if not {*names} <= {*PLACE}:
        raise invalid(f"by is {quoted(text)}; write day, key or model, or several of them with commas between", "by")
    by = tuple(name for name in PLACE if name in names)
    return Selection(first.isoformat(), last.isoformat(), key, model, by)


def _day(query: QueryParams, name: str, usual: date) -> date:
    text = query.get(name)
    if text is None:
        return usual
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise invalid(f"{name} is {quoted(text)}; write a day such as {usual}", name) from None


def as_csv(rows: Sequence[Row], by: Collection[str] = PLACE) -> bytes:
    """A table that a spreadsheet shows as it is: a name that looks like a formula gets an apostrophe in front."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\r\n")
    table.writerow((*(name for name in PLACE if name in by), *COUNTED))
    for row in rows:
        place = (f"'{name}" if name.startswith(FORMULA) else name for name in _place(row, by).values())
        table.writerow((*place, *astuple(row.counts)))
    return text.getvalue().encode()


def _place(row: Row, by: Collection[str]) -> dict[str, str]:
    place = {"day": row.day, "key": row.key or NO_KEY, "model": row.model}
    return {name: text for name, text in place.items() if name in by}
