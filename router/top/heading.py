"""The lines above the tables: the router's state, totals, and whether the figures are stale."""

from collections import Counter

from rich.text import Text

from events.tool.words import printable
from router.console.formatting import ago, count, duration, percent, rate, short, sparkline
from router.top.columns import WARM
from router.top.poller import DECISIONS, KEY_HINT, PREFIXES, REPLICAS, Poller
from router.top.rows import STATES, STYLES, state_of

GAP = "  "
STALE = "bold black on yellow"
ALARMING = ("gaps", "lost_batches", "restarts", "digest_mismatches")
EVENTS = (  # summed over all streams
    ("lag", "lag_batches"),
    ("gaps", "gaps"),
    ("lost", "lost_batches"),
    ("repairs", "repairs"),
    ("restarts", "restarts"),
    ("digests differed", "digest_mismatches"),
)


def heading(poller: Poller, *, paused: bool = False) -> list[Text]:
    """Three lines, the most important figures first: a narrow terminal cuts the rest."""
    return [_replicas(poller, paused=paused), _work(poller), _events(poller)]


def _replicas(poller: Poller, *, paused: bool) -> Text:
    line = Text()
    if poller.is_stale:
        line.append(f" {stale_text(poller)} ", STALE)
        line.append(GAP)
    elif paused:
        line.append(" paused, p continues ", STALE)
        line.append(GAP)
    line.append(printable(poller.client.router_url), "bold")
    line.append(f"{GAP}{count(len(poller.replicas), 'replica')}")
    found = Counter(map(state_of, poller.replicas))
    for number, state in enumerate(state for state in reversed(STATES) if found[state]):
        line.append(", " if number else ": ")
        line.append(f"{found[state]:,} {state}", STYLES[state])
    if poller.totals is not None and poller.totals.draining:
        line.append(f"{GAP}the router drains", "bold red")
    _trend(line, poller)
    return line


def _trend(line: Text, poller: Poller) -> None:
    """Draw requests and hits of the last polls."""
    trend = poller.history.trend
    if len(trend) < 2:
        return
    line.append(f"{GAP}req/s ")
    line.append(sparkline(one.requests_per_s for one in trend), "green")
    line.append(f"{GAP}hits ")
    line.append(sparkline((one.hit or 0.0 for one in trend), top=1.0), WARM)


def stale_text(poller: Poller) -> str:
    """Why the figures are stale, and how old they are."""
    age_s = poller.age_s()
    old = "" if age_s is None else f", figures {ago(age_s)} old"
    if poller.silence is not None:
        return f"NO ANSWER{old}: {printable(poller.silence)}"
    why, hint, _ = printable(poller.refused[REPLICAS]).partition(f"; see {KEY_HINT}")
    return f"REFUSED{old}{hint}: {why}"  # the hint first, so that it is not cut off


def _work(poller: Poller) -> Text:
    rates, totals = poller.history.total(), poller.totals
    figures = [
        ("req/s", rate(rates.requests_per_s if rates else None)),
        ("tokens/s", rate(rates.generated_tokens_per_s if rates else None)),
        ("each", duration(rates.token_s if rates else None)),
        ("prompt/s", rate(rates.prompt_tokens_per_s if rates else None)),
        ("hits", percent(rates.hit if rates else None)),
    ]
    if totals is not None:
        figures += [
            ("TTFT", duration(poller.history.mean_ttft_s())),
            ("open", short(totals.open_requests)),
            ("waiting", short(totals.queue_length)),
        ]
        failures = (
            ("retries", totals.retries_total),
            ("resumes", totals.resumes_total),
            ("refused", totals.refused_total),
        )
        figures += [(name, short(number)) for name, number in failures if number]
    return _joined(figures)


def _events(poller: Poller) -> Text:
    streams = [one.events for one in poller.replicas if one.events is not None]
    if not streams:
        return Text("no event streams" if poller.replicas else "", "dim")
    risen = poller.history.any_risen()
    rates = poller.history.total()
    line = Text("events ")
    line.append(f"{rate(rates.batches_per_s if rates else None)}/s", "bold")
    for name, field in EVENTS:
        number = sum(getattr(stream, field) for stream in streams)
        line.append(f"{GAP}{name} ")
        line.append(f"{number:,}", "bold red" if field in risen and field in ALARMING else "bold")
    return line


def _joined(figures: list[tuple[str, str]]) -> Text:
    line = Text()
    for number, (name, value) in enumerate(figures):
        line.append(f"{GAP if number else ''}{name} ")
        line.append(value, "bold")
    return line


EMPTY = {
    REPLICAS: "The router has no replicas yet; add one with `warmroute router --replica`.",
    PREFIXES: "No recent prompts share a prefix.",
    DECISIONS: "No decisions yet.",
}


def empty_text(poller: Poller, path: str) -> str:
    """The placeholder of a table without rows."""
    return poller.refused.get(path, EMPTY[path])
