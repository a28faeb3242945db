"""The lines above the tables: how the whole router is doing, and whether what is shown is of now."""

from collections import Counter

from rich.text import Text

from events.tool.words import printable
from router.top.asking import KEY_HINT
from router.top.states import STATES, STYLES, state_of
from router.top.watch import DECISIONS, PREFIXES, REPLICAS, Watch
from router.top.words import ago, count, duration, percent, rate, short

GAP = "  "
STALE = "bold black on yellow"
ALARMING = ("gaps", "lost_batches", "restarts", "digest_mismatches")
EVENTS = (  # what is said of all streams together
    ("lag", "lag_batches"),
    ("gaps", "gaps"),
    ("lost", "lost_batches"),
    ("repairs", "repairs"),
    ("restarts", "restarts"),
    ("digests differed", "digest_mismatches"),
)


def heading(watch: Watch, *, paused: bool = False) -> list[Text]:
    """Three lines; what matters most stands first in each, for terminals that have no room for all of it."""
    return [_replicas(watch, paused=paused), _work(watch), _events(watch)]


def _replicas(watch: Watch, *, paused: bool) -> Text:
    line = Text()
    if watch.is_old:
        line.append(f" {stale(watch)} ", STALE)
        line.append(GAP)
    elif paused:
        line.append(" paused, p goes on ", STALE)
        line.append(GAP)
    line.append(printable(watch.asking.router_url), "bold")
    line.append(f"{GAP}{count(len(watch.replicas), 'replica')}")
    found = Counter(map(state_of, watch.replicas))
    for number, state in enumerate(state for state in reversed(STATES) if found[state]):
        line.append(", " if number else ": ")
        line.append(f"{found[state]:,} {state}", STYLES[state])
    if watch.totals is not None and watch.totals.draining:
        line.append(f"{GAP}the router drains", "bold red")
    return line


def stale(watch: Watch) -> str:
    """Why what is shown is not of now."""
    age_s = watch.age_s()
    old = "" if age_s is None else f", figures {ago(age_s)} old"
    if watch.absence is not None:
        return f"NO ANSWER{old}: {printable(watch.absence)}"
    why, hint, _ = printable(watch.refused[REPLICAS]).partition(f"; see {KEY_HINT}")
    return f"REFUSED{old}{hint}: {why}"  # what helps should not be cut off


def _work(watch: Watch) -> Text:
    rates, totals = watch.history.total(), watch.totals
    figures = [
        ("req/s", rate(rates.requests_per_s if rates else None)),
        ("prompt tokens/s", rate(rates.prompt_tokens_per_s if rates else None)),
        ("hits", percent(rates.hit if rates else None)),
    ]
    if totals is not None:
        figures += [
            ("open", short(totals.open_requests)),
            ("waiting", short(totals.queue_length)),
            ("TTFT", duration(watch.history.mean_ttft_s())),
        ]
        failures = (
            ("retries", totals.retries_total),
            ("resumes", totals.resumes_total),
            ("refused", totals.refused_total),
        )
        figures += [(name, short(number)) for name, number in failures if number]
    return _joined(figures)


def _events(watch: Watch) -> Text:
    streams = [one.events for one in watch.replicas if one.events is not None]
    if not streams:
        return Text("no event streams are followed" if watch.replicas else "", "dim")
    risen = watch.history.any_risen()
    rates = watch.history.total()
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


def nothing_of(watch: Watch, path: str) -> str:
    """What stands where a table has no rows."""
    if path in watch.refused:
        return watch.refused[path]
    if path == REPLICAS:
        return "The router knows no replica yet; see `warmroute router --replica`."
    if path == PREFIXES:
        return "No two prompts have begun alike of late."
    if path == DECISIONS:
        return "Nothing has been decided yet."
    return ""
