"""Details of one replica, prefix or decision, as lines."""

import math
import textwrap
from collections.abc import Iterable, Sequence

from rich.text import Text

from events.tool.words import printable
from router.formatting import ago, count, duration, percent, rate, short, told_portions
from router.prompts.prefixes.shared import Prefix
from router.responses import ReplicaStatus
from router.top.history import Rates
from router.top.reasons import reason_for
from router.top.responses import Candidate, Decision
from router.top.rows import (
    Branch,
    Row,
    cache_use,
    cached_tokens,
    clock,
    is_mispredicted,
    natural,
    saved_tokens,
    text_of,
    tokens_or_none,
)
from router.top.states import STYLES, reason_of, state_of

LABEL = 23
LAST_DECISIONS = 8  # shown for a replica
Pairs = Iterable[tuple[str, str]]


def titled(title: str, pairs: Pairs) -> list[Text]:
    """A title and its lines; empty values are left out."""
    lines = [Text.assemble((f"  {name:<{LABEL}}", "dim"), printable(value)) for name, value in pairs if value]
    return [Text(title, "bold"), *lines, Text()] if lines else []


# ---- a replica


def replica_lines(row: Row, decisions: Sequence[Decision]) -> list[Text]:
    replica = row.replica
    state, reason = state_of(replica), reason_of(replica)
    first = Text.assemble((printable(replica.name), "bold"), "  ", (state, STYLES[state]))
    first.append(f": {printable(reason)}" if reason else "")
    return [
        first,
        Text(),
        *titled("Identity", _identity(replica)),
        *titled("Work", _work(replica, row.rates)),
        *titled("Cache", _cache(replica, row.rates)),
        *titled("Events", _events(replica, row.rates)),
        *_last_decisions(replica.name, decisions),
    ]


def _identity(replica: ReplicaStatus) -> Pairs:
    yield "url", replica.url
    yield "engine", replica.engine
    yield "models", ", ".join(replica.models)
    yield "incarnation", "" if replica.incarnation is None else str(replica.incarnation)
    yield "last heard", "" if replica.heard_age_s is None else f"{ago(replica.heard_age_s)} ago"
    yield "breaker", replica.breaker
    yield "slow start", f"load counts {replica.slowness:.1f} times" if replica.slowness > 1 else ""
    yield "longest prompt", "" if replica.max_model_len is None else count(replica.max_model_len, "token")
    yield "tokenizer", replica.tokenizer or ""
    yield "isolation", replica.isolation or ""


def _work(replica: ReplicaStatus, rates: Rates | None) -> Pairs:
    load = replica.load
    yield "running, waiting", f"{load.running:,}, {load.waiting:,}"
    yield "from this router", f"{count(load.in_flight, 'request')} in flight, {replica.served.requests:,} served"
    yield "queue", count(load.queued_tokens, "prompt token")
    yield "prefill speed", f"{short(load.prefill_tokens_per_s)} tokens/s" if load.prefill_tokens_per_s else ""
    if rates is not None:
        prompts, prefill = rate(rates.prompt_tokens_per_s), rate(rates.prefill_tokens_per_s)
        yield "recently", f"{rate(rates.requests_per_s)} requests/s, {prompts} prompt tokens/s, {prefill} not cached"


def _cache(replica: ReplicaStatus, rates: Rates | None) -> Pairs:
    blocks = replica.index.blocks
    size = f" of {replica.block_size}" if replica.block_size else ""
    held = ", ".join(f"{number:,} in {medium}" for medium, number in blocks.items())
    yield f"blocks{size}", held or "none"
    yield "tokens", short(cached_tokens(replica)) if replica.block_size else ""
    total = replica.load.total_blocks
    yield "used", f"{percent(cache_use(replica))} of {total:,} blocks" if total else ""
    empty = replica.load.empty_tokens
    yield "empty", "" if empty is None else f"{short(empty)} tokens"
    if rates is not None and rates.hit is not None:
        yield "recent hits", f"{percent(rates.hit)} of the prompt tokens"
    served = replica.served
    if served.prompt_tokens:
        share = served.matched_tokens / served.prompt_tokens
        yield "all hits", f"{share:.0%} of {short(served.prompt_tokens)} tokens"
    yield "right predictions", f"{replica.index.accuracy:.2%} of the last 1,000"


def _events(replica: ReplicaStatus, rates: Rates | None) -> Pairs:
    events = replica.events
    if events is None:
        yield "stream", "none: its cache is estimated from the requests sent to it"
        return
    yield "stream", "connected" if events.connected else "not connected"
    yield "last batch", f"number {events.seq:,}" if events.seq >= 0 else "none yet"
    yield "last event", "" if events.last_event_age_s is None else f"{ago(events.last_event_age_s)} ago"
    yield "recently", f"{rate(rates.batches_per_s)} batches/s" if rates is not None else ""
    yield "lag", count(events.lag_batches, "batch").replace("batchs", "batches")
    yield "gaps, lost batches", f"{events.gaps:,}, {events.lost_batches:,}"
    yield "replays, snapshots", f"{events.replays:,}, {events.snapshots:,}"
    yield "restarts, reconnects", f"{events.restarts:,}, {events.reconnects:,}"
    yield "digest mismatches", f"{events.digest_mismatches:,}"
    yield "inexact because", replica.inexact or ""


def _last_decisions(name: str, decisions: Sequence[Decision]) -> list[Text]:
    chosen = [one for one in decisions if one.chosen == name][:LAST_DECISIONS]
    return titled("Last decisions", ((f"{clock(one.ts)} {one.prompt_tokens:,}", _outcome(one)) for one in chosen))


def _outcome(decision: Decision) -> str:
    predicted = tokens_or_none(decision.predicted_cached_tokens)
    reported = tokens_or_none(decision.reported_cached_tokens)
    return f"{predicted} predicted, {reported} reported, {reason_for(decision)}"


# ---- a prefix


def prefix_lines(branch: Branch, width: int) -> list[Text]:
    prefix = branch.prefix
    end = prefix.begin + prefix.tokens
    return [
        Text(f"Tokens {prefix.begin:,} to {end:,} of {count(prefix.prompts, 'prompt')}", "bold"),
        Text(),
        *titled("Usage", _usage(prefix)),
        *_texts(branch, width),
    ]


def _usage(prefix: Prefix) -> Pairs:
    yield "model", prefix.model
    yield "matched", "exactly" if prefix.exact else "approximately, by bytes instead of tokens"
    yield "last prompt", f"{ago(prefix.idle_s)} ago"
    named = ", ".join(map(prefix.named, sorted(prefix.replicas, key=natural))) or "nobody"
    more = prefix.held_by - len(prefix.replicas)
    yield "held by", f"{named} and {more:,} more" if more > 0 else named
    yield "retained", "" if prefix.retained_s is None else f"for {ago(prefix.retained_s)} after no more use"
    yield "a cache saves", f"{count(saved_tokens(prefix), 'token')} of these prompts"
    yield "continued by", count(len(prefix.below), "prefix").replace("prefixs", "prefixes") if prefix.below else ""


def _texts(branch: Branch, width: int) -> list[Text]:
    """The prompt's text from its start, each prefix at its token number."""
    if branch.prefix.text is None:
        return [Text("Texts are not kept; start the router with --show-prompts to see them.", "dim")]
    lines = [Text("Text", "bold")]
    for run in (*branch.above, branch.prefix):
        style = "" if run is branch.prefix else "dim"
        wrapped = textwrap.wrap(text_of(run), max(20, width - 12)) or [""]
        lines += [
            Text(f"{f'{run.begin:,}' if not number else '':>9}  {part}", style) for number, part in enumerate(wrapped)
        ]
    return lines


# ---- a decision


def decision_lines(decision: Decision, width: int) -> list[Text]:
    return [
        Text.assemble((printable(decision.chosen or "nobody"), "bold"), f": {printable(reason_for(decision))}"),
        Text(),
        *titled("Request", _request(decision)),
        *titled("Cached tokens", _prediction(decision)),
        *titled("Prompt tokens", (("", told) for told in told_portions(decision.portions))),
        *titled("Times", _times(decision)),
        *_candidates(decision, width),
    ]


def _request(decision: Decision) -> Pairs:
    yield "id", decision.request_id
    yield "time", clock(decision.ts)
    yield "model", decision.model
    yield "prompt", f"{'' if decision.exact else 'about '}{count(decision.prompt_tokens, 'token')}"
    yield "status", str(decision.status) if decision.status else "none: the client left"
    yield "policy", decision.policy
    if (prefill := decision.prefill) is not None and prefill.outcome:
        yield "prompt", f"computed at {prefill.replica} in {duration(prefill.duration_s)}: {prefill.outcome}"
    yield "retries, resumes", f"{decision.retries}, {decision.resumes}" if decision.retries or decision.resumes else ""


def _prediction(decision: Decision) -> Pairs:
    yield "predicted", tokens_or_none(decision.predicted_cached_tokens)
    reported = tokens_or_none(decision.reported_cached_tokens)
    yield "reported", f"{reported}, less than predicted" if is_mispredicted(decision) else reported
    if decision.prediction_exact is not None:
        yield "exact", "yes" if decision.prediction_exact else f"no: {decision.why_inexact or 'it is only guessed'}"


def _times(decision: Decision) -> Pairs:
    yield "estimated TTFT", duration(decision.estimated_ttft_s)
    yield "TTFT", duration(decision.ttft_s)
    yield "duration", duration(decision.duration_s)
    yield "queued", duration(decision.waited_s) if decision.waited_s else ""


def _candidates(decision: Decision, width: int) -> list[Text]:
    """The candidates, cheapest first, with their costs at the time of the decision."""
    if not decision.candidates:
        return []
    longest = min(max(len(one.name) for one in decision.candidates), max(8, width - 30))
    lines = [Text("Candidates", "bold"), Text(f"    {'replica':<{longest}}{'cached':>10}{'cost':>12}", "dim")]
    for one in sorted(decision.candidates, key=_by_cost):
        chosen = one.name == decision.chosen
        cost = "ineligible" if one.cost_s is None else duration(one.cost_s)
        line = (
            f"  {'>' if chosen else ' '} {printable(one.name)[:longest]:<{longest}}{one.matched_tokens:>10,}{cost:>12}"
        )
        lines.append(Text(line, "bold green" if chosen else "dim" if one.cost_s is None else ""))
    return lines


def _by_cost(one: Candidate) -> tuple[float, list[tuple[int, str]]]:
    return math.inf if one.cost_s is None else one.cost_s, natural(one.name)
