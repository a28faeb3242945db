"""The lines above the tables: the router's state, totals, and whether the figures are stale."""

from collections import Counter
from collections.abc import Iterable

from rich.text import Text

from events.tool.words import printable
from router.console.formatting import ago, count, duration, percent, rate, short, sparkline
from router.top.poller import DECISIONS, KEY_HINT, PREFIXES, REPLICAS, Poller
from router.top.tables import STATES, STYLES, WARM, state_of

GAP = "  "
STALE = "bold black on yellow"
ALARM = "bold red"
EVENTS = (  # summed over all streams
    ("lag", "lag_batches"),
    ("gaps", "gaps"),
    ("lost", "lost_batches"),
    ("repairs", "repairs"),
    ("restarts", "restarts"),
    ("digests differed", "digest_mismatches"),
)
EMPTY = {
    REPLICAS: "The router has no replicas yet; add one with `warmroute router --replica`.",
    PREFIXES: "No recent prompts share a prefix.",
    DECISIONS: "No decisions yet.",
}


def empty_text(poller: Poller, path: str) -> str:
    """The placeholder of a table without rows."""
    return poller.refused.get(path, EMPTY[path])


def heading(poller: Poller, *, paused: bool = False) -> list[Text]:
    """Three lines, the most important figures first: a narrow terminal cuts the rest."""
    return [_replicas(poller, paused=paused), _work(poller), _events(poller)]


def _replicas(poller: Poller, *, paused: bool) -> Text:
    line = Text()
    if poller.is_stale or paused:
        line.append(f" {stale_text(poller) if poller.is_stale else 'paused, p continues'} ", STALE)
        line.append(GAP)
    line.append(printable(poller.client.router_url), "bold")
    line.append(f"{GAP}{count(len(poller.replicas), 'replica')}")
    found = Counter(map(state_of, poller.replicas))
    for number, state in enumerate(state for state in reversed(STATES) if found[state]):
        line.append(", " if number else ": ")
        line.append(f"{found[state]:,} {state}", STYLES[state])
    if poller.totals is not None and poller.totals.draining:
        line.append(f"{GAP}the router drains", ALARM)
    trend = poller.history.trend
    if len(trend) > 1:  # requests and hits of the last polls
        line.append(f"{GAP}req/s ")
        line.append(sparkline(one.requests_per_s for one in trend), "green")
        line.append(f"{GAP}hits ")
        line.append(sparkline((one.hit or 0.0 for one in trend), top=1.0), WARM)
    return line


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
        ("req/s", rate(rates and rates.requests_per_s), "bold"),
        ("tokens/s", rate(rates and rates.generated_tokens_per_s), "bold"),
        ("each", duration(rates and rates.token_s), "bold"),
        ("prompt/s", rate(rates and rates.prompt_tokens_per_s), "bold"),
        ("hits", percent(rates and rates.hit), "bold"),
    ]
    if totals is not None:
        figures += [
            ("TTFT", duration(poller.history.mean_ttft_s()), "bold"),
            ("open", short(totals.open_requests), "bold"),
            ("waiting", short(totals.queue_length), "bold"),
        ]
        for name in ("retries", "resumes", "refused"):
            if number := getattr(totals, f"{name}_total"):
                figures.append((name, short(number), "bold"))
    return _joined(figures)


def _events(poller: Poller) -> Text:
    streams = [one.events for one in poller.replicas if one.events is not None]
    if not streams:
        return Text("no event streams" if poller.replicas else "", "dim")
    rates, alarming = poller.history.total(), poller.history.any_risen() - {"repairs"}  # these mend
    figures = [("events", f"{rate(rates and rates.batches_per_s)}/s", "bold")]
    for name, field in EVENTS:
        number = sum(getattr(stream, field) for stream in streams)
        figures.append((name, f"{number:,}", ALARM if field in alarming else "bold"))
    return _joined(figures)


def _joined(figures: Iterable[tuple[str, str, str]]) -> Text:
    """Each figure has its name, its value and the value's style."""
    line = Text()
    for name, value, style in figures:
        line.append(f"{GAP if line else ''}{name} ")
        line.append(value, style)
    return line
