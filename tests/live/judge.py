"""Drives a row's requests through a router, and holds its predictions against the engine's own log."""

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import httpx2
from msgspec import Struct

from tests.live.traffic import Asked, text_of


class Tally(Struct):
    """Counts of a row."""

    requests: int = 0
    failed: int = 0  # answered with an error
    unmatched: int = 0  # the engine's log does not name them
    exact: int = 0  # predictions called exact
    equal: int = 0  # of these
    wrong: list[str] = []  # the first of the others
    doubts: dict[str, list[bool]] = {}  # why predictions were not called exact, and whether each was equal

    @property
    def line(self) -> str:
        compared = self.requests - self.failed - self.unmatched
        return f"{self.requests:8} {self.failed:6} {share(self.exact, compared):>8} {share(self.equal, self.exact):>8}"

    @property
    def explanations(self) -> Iterator[str]:
        yield from self.wrong
        for doubt, equal in self.doubts.items():
            yield f"not called exact: {len(equal)}, {sum(equal)} of these equal: {doubt}"


HEADING = f"{'requests':>8} {'failed':>6} {'exact':>8} {'equal':>8}"


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


async def drive(url: str, asked: Iterator[Asked], count: int, clients: int) -> list[str]:
    """Send requests, from each client one after another; return the errors among the answers."""
    failed: list[str] = []
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:

        async def one_client(share: int) -> None:
            for _ in range(share):
                request = next(asked)
                answer = await client.post(request.path, json=request.body)
                if answer.status_code == 200:
                    request.remember(text_of(request.path, answer.json()))
                else:
                    failed.append(f"{request.path}: {answer.status_code} {answer.text[:200]}")
                    request.remember("sorry")

        await asyncio.gather(*(one_client(count // clients) for _ in range(clients)))
    return failed


def judge(count: int, decisions: list[dict[str, Any]], hits: Mapping[str, int], errors: list[str]) -> Tally:
    """Compare every prediction that is called exact with what the engine's cache manager found."""
    tally = Tally(requests=count, failed=len(errors), wrong=errors[:3])
    for decision in decisions:
        if decision["status"] != 200:
            continue
        found = hits.get(decision["request_id"])
        if found is None:
            tally.unmatched += 1
            if tally.unmatched == 1:
                tally.wrong.append(f"{decision['request_id']}: not in the engine's log")
            continue
        if not is_called_exact(decision):
            doubt = str(decision["why_inexact"])
            tally.doubts.setdefault(doubt, []).append(decision["predicted_cached_tokens"] == found)
            continue
        tally.exact += 1
        predicted = decision["predicted_cached_tokens"]
        if predicted == found:
            tally.equal += 1
        elif len(tally.wrong) < 5:
            tally.wrong.append(f"{decision['request_id']}: predicted {predicted}, found {found}")
    return tally


def is_called_exact(decision: dict[str, Any]) -> bool:
    """Return True if the router calls its prediction exact."""
    return bool(decision.get("prediction_exact", decision["exact"])) and decision["predicted_cached_tokens"] is not None
