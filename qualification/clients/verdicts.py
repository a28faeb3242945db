"""Verdicts of the programs: read from JUnit's XML, printed as a table, and kept in results.json."""

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from msgspec import Struct

from qualification.clients.rows import CLIENTS

RESULTS = Path(__file__).with_name("results.json")
HEADING = f"{'':20} {'version':12} {'passed':>6} {'checks':>6}"


class Check(Struct, frozen=True):
    """One check of a program: passed, unless there is an error or a reason to skip it."""

    name: str
    error: str | None = None
    skipped: str | None = None
    found: str | None = None  # figures worth keeping


class Verdict(Struct, frozen=True):
    """A client's checks."""

    client: str
    version: str
    checks: tuple[Check, ...]
    seconds: float

    @property
    def passed(self) -> int:
        return sum(check.error is None and check.skipped is None for check in self.checks)

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.error is not None]

    @property
    def skipped(self) -> list[Check]:
        return [check for check in self.checks if check.skipped is not None]

    @property
    def found(self) -> dict[str, str]:
        return {check.name: check.found for check in self.checks if check.found is not None}

    @property
    def lines(self) -> Iterable[str]:
        """The verdict's line of the table, and one for each check that has not passed."""
        yield f"{self.client:20} {self.version:12} {self.passed:6} {len(self.checks):6}   ({self.seconds:.0f} s)"
        for check in self.failed:
            yield f"    {check.name}: {check.error}"
        for check in self.skipped:
            yield f"    {check.name}: skipped: {check.skipped}"
        for name, found in self.found.items():
            yield f"    {name}: {found}"


def read(report: Path) -> tuple[Check, ...]:
    """Read the checks of a report."""
    return tuple(_check(case) for case in ElementTree.parse(report).iter("testcase"))


def _check(case: ElementTree.Element) -> Check:
    name = case.get("name", "").removeprefix("test_").replace("_", " ")
    for kind in ("failure", "error"):
        if (found := case.find(kind)) is not None:
            said = found.get("message") or found.text or kind
            return Check(name, error=" ".join(said.split())[:500])
    if (found := case.find("skipped")) is not None:
        return Check(name, skipped=" ".join((found.get("message") or "").split()))
    return Check(name)


def record(verdicts: Iterable[Verdict], file: Path = RESULTS) -> None:
    """Put verdicts into the file, in place of earlier ones of the same clients."""
    kept: dict[str, Any] = {row["client"]: row for row in json.loads(file.read_text())} if file.exists() else {}
    for verdict in verdicts:
        kept[verdict.client] = {
            "client": verdict.client,
            "version": verdict.version,
            "tries": CLIENTS[verdict.client].tries,
            "passed": verdict.passed,
            "checks": len(verdict.checks),
            "failed": [check.name for check in verdict.failed],
            "skipped": {check.name: check.skipped for check in verdict.skipped},
            **({"found": verdict.found} if verdict.found else {}),
            "date": datetime.now(UTC).date().isoformat(),
        }
    rows = [kept[name] for name in CLIENTS if name in kept]
    file.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
