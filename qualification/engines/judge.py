"""Drives a row's requests through a router, and holds its predictions against the engine's own log."""

import asyncio
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import httpx2
from msgspec import Struct

from qualification.engines.engine import Found
from qualification.engines.explain import Explanation, Kind, Wrong, explain
from qualification.engines.published import Published
from qualification.engines.traffic import Asked, text_of
from router.log_lines import LogLine

RANK = re.compile(r"@dp(\d+)$")
MAX_SHOWN = 5
HEADING = f"{'requests':>8} {'failed':>6} {'exact':>8} {'equal':>8}"


class Sent(Struct):
    """Requests that were sent: the errors among their answers, and the router's ids by the answers' own."""

    errors: list[str] = []
    names: dict[str, str] = {}


class Tally(Struct):
    """Counts of a row."""

    requests: int = 0
    failed: int = 0  # answered with an error
    unmatched: int = 0  # the engine's log does not name them
    exact: int = 0  # predictions called exact
    equal: int = 0  # of these
    errors: list[str] = []  # the first
    wrong: dict[str, str] = {}  # the other predictions called exact, by the router's id
    explained: dict[str, int] = {}  # the kinds of their explanations
    doubts: dict[str, list[bool]] = {}  # why predictions were not called exact, and whether each was equal

    @property
    def called_exact(self) -> str:
        return share(self.exact, self.requests - self.failed - self.unmatched)

    @property
    def line(self) -> str:
        return f"{self.requests:8} {self.failed:6} {self.called_exact:>8} {share(self.equal, self.exact):>8}"

    @property
    def explanations(self) -> Iterator[str]:
        yield from self.errors
        for kind, count in self.explained.items():
            yield f"wrong: {count}: {kind}"
        yield from list(self.wrong.values())[:MAX_SHOWN]
        for doubt, equal in self.doubts.items():
            yield f"not called exact: {len(equal)}, {sum(equal)} of these equal: {doubt}"

    @property
    def unexplained(self) -> int:
        return len(self.wrong) - sum(count for kind, count in self.explained.items() if kind != Kind.NONE)

    def explain(self, explanations: Iterable[Explanation]) -> None:
        """Add explanations to the wrong predictions."""
        for one in explanations:
            self.wrong[one.wrong.request_id] = str(one)
            self.explained[one.kind.value] = self.explained.get(one.kind.value, 0) + 1


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


async def drive(url: str, asked: Iterator[Asked], count: int, clients: int) -> Sent:
    """Send requests, from each client one after another."""
    sent = Sent()
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:

        async def one_client(share: int) -> None:
            for _ in range(share):
                request = next(asked)
                answer = await client.post(request.path, json=request.body)
                if answer.status_code == 200:
                    content = answer.json()
                    sent.names[content["id"]] = answer.headers.get("x-request-id", "")
                    request.remember(text_of(request.path, content))
                else:
                    sent.errors.append(f"{request.path}: {answer.status_code} {answer.text[:200]}")
                    request.remember("sorry")

        await asyncio.gather(*(one_client(count // clients) for _ in range(clients)))
    return sent


def judge(count: int, decisions: Iterable[dict[str, Any]], found: Mapping[str, Found], errors: list[str]) -> Tally:
    """Compare every prediction that is called exact with the engine's finding; `found`: by the router's ids."""
    tally = Tally(requests=count, failed=len(errors), errors=errors[:3])
    for decision in decisions:
        if decision["status"] != 200:
            continue
        name, predicted = decision["request_id"], decision["predicted_cached_tokens"]
        one = found.get(name)
        if one is None:
            tally.unmatched += 1
            if tally.unmatched == 1:
                tally.errors.append(f"{name}: not in the engine's log")
        elif not is_called_exact(decision):
            tally.doubts.setdefault(str(decision["why_inexact"]), []).append(predicted == one.tokens)
        else:
            tally.exact += 1
            if predicted == one.tokens:
                tally.equal += 1
            else:
                tally.wrong[name] = f"{name}: predicted {predicted}, found {one.tokens}"
    return tally


def is_called_exact(decision: dict[str, Any]) -> bool:
    """Return True if the router calls its prediction exact."""
    return bool(decision.get("prediction_exact", decision["exact"])) and decision["predicted_cached_tokens"] is not None


def explain_wrong(tally: Tally, lines: Iterable[LogLine], found: Mapping[str, Found], events: Published) -> None:
    """Add to a tally why its wrong predictions were wrong. `lines`: of the router's request log."""
    by_rank: dict[int, list[Wrong]] = {}
    for line in lines:
        if line.request_id in tally.wrong:
            named = RANK.search(line.replica or "")
            by_rank.setdefault(int(named[1]) if named else 0, []).append(_wrong(line, found[line.request_id]))
    for rank, wrong in by_rank.items():
        tally.explain(explain(wrong, events.batches(rank)))


def _wrong(line: LogLine, found: Found) -> Wrong:
    seq = line.known_batch
    assert seq is not None and line.predicted_tokens is not None, f"{line.request_id}: a claim without events"
    decided_s = line.ts + line.sendings[-1].sent_at_s - line.at_s
    return Wrong(
        line.request_id, found, line.predicted_tokens, line.block_tokens, seq, decided_s, line.ts + line.duration_s
    )
