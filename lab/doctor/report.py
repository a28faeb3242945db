"""Findings in words for people, and as one JSON object."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import msgspec

from router.console.formatting import count
from router.dashboard.doctor.figures import Figures
from router.dashboard.doctor.rules import Finding
from router.responses import CAUSES

SHARES = ("_share", "_full", "_usage", "one_replica")  # how the names of those end that are shown in per cent


def summary(figures: Figures) -> str:
    replicas = figures.replicas
    parts = [count(len(replicas), "replica"), f"{_requests(figures):,.0f} requests in {figures.window_s:.0f} s"]
    hits = [(one.hit_share, one.prompt_tokens) for one in replicas if one.hit_share is not None]
    tokens = sum(weight for _, weight in hits)
    if tokens:
        parts.append(f"{sum((share or 0) * weight for share, weight in hits) / tokens:.0%} of the prompt tokens hit")
    computed = {cause: sum(getattr(one.told, cause) for one in replicas) for cause in CAUSES}
    if whole := sum(computed.values()):
        named = sorted(((part, cause[:-7]) for cause, part in computed.items() if part), reverse=True)
        parts.append(f"of those computed {', '.join(f'{part / whole:.0%} {cause}' for part, cause in named)}")
    usages = [one.own.usage for one in replicas if one.own is not None and one.own.usage is not None]
    if usages:
        parts.append(f"at most {max(usages):.0%} of a KV cache held by requests")
    states = sorted({one.routed.state for one in replicas if one.routed is not None})
    if states:
        unproved = " by its events alone" if unproved_indexes(figures) else ""
        parts.append(f"index {' and '.join(states)}{unproved}")
    return ", ".join(parts)


def unproved_indexes(figures: Figures) -> list[str]:
    """Replicas whose index is called exact, but no answer has been compared with it."""
    return [
        one.name
        for one in figures.replicas
        if one.routed is not None and one.routed.state == "exact" and not one.routed.predictions_ever
    ]


def unseen(figures: Figures) -> Iterator[str]:
    """Name what could not be judged, as nothing of it was seen."""
    if not _requests(figures):
        yield "no requests came: rules that need load were not checked"
    if unproved := unproved_indexes(figures):
        yield f"no answer has been compared with the index of {', '.join(unproved)} yet"


def _requests(figures: Figures) -> float:
    return figures.router.requests if figures.router else sum(one.prompts for one in figures.replicas)


def lines(figures: Figures, found: Sequence[Finding]) -> Iterator[str]:
    gaps = list(unseen(figures))
    if not found:
        yield f"nothing wrong{' in what was seen' if gaps else ''}: {summary(figures)}"
        yield from gaps
    else:
        yield f"{count(len(found), 'finding')}: {summary(figures)}"
    for rule, same in groupby(found, key=lambda finding: finding.rule):
        findings = list(same)
        names = [finding.replica for finding in findings if finding.replica is not None]
        yield ""
        yield f"{rule}  {', '.join(names)}".rstrip()
        for what, alike in groupby(findings, key=lambda finding: finding.what):
            yield f"  {what}"
            for one in alike:
                yield f"    {one.replica + ': ' if one.replica else ''}{figures_in_words(one.figures)}"
        for turn in dict.fromkeys(one.turn for one in findings):
            yield f"  turn: {turn}"
        yield f"  see {findings[0].anchor}"
    if figures.notes and found:
        yield ""
    for note in figures.notes:
        yield f"note: {note}"


def figures_in_words(figures: dict[str, float | str]) -> str:
    def written(name: str, value: float | str) -> str:
        if isinstance(value, str):
            return value
        if name.endswith(SHARES):
            return f"{value:.0%}"
        return f"{value:,.0f}" if value == int(value) or value >= 100 else f"{value:.2g}"

    named = ((name, written(name, value)) for name, value in figures.items() if value != "")
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in named)


def as_json(figures: Figures, found: Sequence[Finding]) -> str:
    told: dict[str, Any] = {
        "findings": [{**msgspec.structs.asdict(finding), "see": finding.anchor} for finding in found],
        "summary": summary(figures),
        "figures": figures,
    }
    return msgspec.json.encode(told).decode()
