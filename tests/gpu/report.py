"""Measurements and checks, kept as results.json and results.md; both files are complete after every row."""

import json
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from tests.gpu.apart import last_line

NOT_MET = "not met"


class Row(Struct, frozen=True):
    what: str
    measured: str
    target: str = ""
    met: bool | None = None  # None: no target
    must: bool = False  # a check: if it is not met, the run has failed
    value: float | None = None

    @property
    def failed(self) -> bool:
        return self.must and not self.met


class Section(Struct):
    name: str
    title: str
    status: str = "not run"  # or running, passed, failed, skipped
    seconds: float = 0.0
    error: str = ""
    rows: list[Row] = []

    @property
    def failed(self) -> bool:
        return self.status == "failed"


class Table:
    """Rows of a section."""

    def __init__(self, say: Callable[[Row], None], *, judges: bool = True) -> None:
        """Without `judges`, figures get no targets."""
        self._say = say
        self._judges = judges

    def check(self, what: str, met: bool, measured: str, target: str = "") -> None:
        """Add a required condition."""
        self._say(Row(what, measured, target, met, must=True))

    def figure(
        self, what: str, values: Sequence[float], unit: str, note: str = "", least: float = 0.0, most: float = 0.0
    ) -> None:
        """Add the median of some measurements, and its target, at least or at most."""
        middle = statistics.median(values)
        target, met = "", None
        if least and self._judges:
            target, met = f">= {least:,g}", middle >= least
        if most and self._judges:
            target, met = f"< {most:,g}", middle < most
        spread = f" ({number(min(values))} to {number(max(values))})" if len(values) > 1 else ""
        measured = f"**{number(middle)}** {unit}".rstrip() + spread + (f"; {note}" if note else "")
        self._say(Row(what, measured, target, met, value=middle))

    def note(self, what: str, text: str) -> None:
        self._say(Row(what, text))


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


class Report:
    def __init__(self, folder: Path, header: dict[str, str], sections: list[Section]) -> None:
        self.folder = folder
        self.header = header
        self.sections = sections

    @property
    def failed(self) -> bool:
        return any(section.failed for section in self.sections)

    def write(self) -> None:
        content = {"header": self.header, "failed": self.failed, "sections": msgspec.to_builtins(self.sections)}
        replace(self.folder / "results.json", json.dumps(content, indent=1) + "\n")
        replace(self.folder / "results.md", "\n".join(self._markdown()) + "\n")

    def _markdown(self) -> list[str]:
        said = [f"{name} {value}" for name, value in self.header.items()]
        return ["; ".join(said) + ".", *(line for section in self.sections for line in markdown(section))]


def markdown(section: Section) -> list[str]:
    lines = ["", f"| {section.title} | measured | target |", "| --- | --- | --- |"] if section.rows else []
    lines += [f"| {row.what} | {cell(row)} | {row.target} |" for row in section.rows]
    if section.status in ("failed", "skipped", "not run", "running"):
        said = last_line(section.error)
        lines += ["", f"{section.name}: {section.status}" + (f": {said}" if said else "")]
    return lines


def cell(row: Row) -> str:
    if row.failed:
        return f"**FAILED** {row.measured}"
    return f"{row.measured} ({NOT_MET})" if row.met is False else row.measured


def replace(file: Path, text: str) -> None:
    """Whoever ends this process ends it with a whole file."""
    beside = file.with_suffix(".part")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, file)


def read(folder: Path) -> Any:
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))
