"""The lines above the tables: the router's state, totals, and whether the figures are stale."""

from collections import Counter
from collections.abc import Iterable

from rich.text import Text

from events.tool.words import printable
from router.console.formatting import ago, count, duration, percent, rate, short
from router.console.top.poller import DECISIONS, KEY_HINT, PREFIXES, REPLICAS, Poller
from router.console.top.tables import STATES, STYLES, state_of

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


def heading(poller: Poller) -> list[Text]:
    """Three lines, the most important figures first: a narrow terminal cuts the rest."""
    return [_replicas(poller), _work(poller), _events(poller)]


def _replicas(poller: Poller) -> Text:
    line = Text()
    if poller.is_stale:
        line.append(f" {stale_text(poller)} ", STALE)
        line.append(GAP)
    line.append(printable(poller.client.router_url), "bold")
    line.append(f"{GAP}{count(len(poller.replicas), 'replica')}")
    found = Counter(map(state_of, poller.replicas))
    for number, state in enumerate(state for state in reversed(STATES) if found[state]):
        line.append(", " if number else ": ")
        line.append(f"{found[state]:,} {state}", STYLES[state])
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
    rates, loads = poller.history.total(), [one.load for one in poller.replicas]
    begun_s = [one.ttft_s for one in poller.decisions if one.ttft_s is not None]
    figures = {
        "req/s": rate(rates and rates.requests_per_s),
        "tokens/s": rate(rates and rates.generated_tokens_per_s),
        "each": duration(rates and rates.token_s),
        "prompt/s": rate(rates and rates.prompt_tokens_per_s),
        "hits": percent(rates and rates.hit),
        "TTFT": duration(sum(begun_s) / len(begun_s) if begun_s else None),
        "open": short(sum(load.in_flight for load in loads)),
        "waiting": short(sum(load.waiting for load in loads)),
    }
    return _joined((name, figure, "bold") for name, figure in figures.items())


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
