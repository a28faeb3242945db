"""Everything that is known of one replica, one prefix or one decision, as lines."""

import math
import textwrap
from collections.abc import Iterable, Sequence

from rich.text import Text

from events.tool.words import printable
from router.prefixes.shared import Prefix
from router.top.answers import Considered, Decision, Replica
from router.top.figures import (
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
from router.top.history import Rates
from router.top.reasons import reason_for
from router.top.states import STYLES, reason_of, state_of
from router.top.words import ago, count, duration, percent, rate, short

LABEL = 23
LAST = 8  # decisions of a replica
Pairs = Iterable[tuple[str, str]]


def titled(title: str, pairs: Pairs) -> list[Text]:
    """A paragraph; what says nothing is left out."""
    lines = [Text.assemble((f"  {name:<{LABEL}}", "dim"), printable(value)) for name, value in pairs if value]
    return [Text(title, "bold"), *lines, Text()] if lines else []


# ---- a replica


def of_replica(row: Row, decisions: Sequence[Decision]) -> list[Text]:
    replica = row.replica
    state, reason = state_of(replica), reason_of(replica)
    first = Text.assemble((printable(replica.name), "bold"), "  ", (state, STYLES[state]))
    first.append(f": {printable(reason)}" if reason else "")
    return [
        first,
        Text(),
        *titled("What it is", _identity(replica)),
        *titled("Work", _work(replica, row.rates)),
        *titled("Cache", _cache(replica, row.rates)),
        *titled("Events", _events(replica, row.rates)),
        *_last_decisions(replica.name, decisions),
    ]


def _identity(replica: Replica) -> Pairs:
    yield "url", replica.url
    yield "engine", replica.engine
    yield "models", ", ".join(replica.models)
    yield "incarnation", "" if replica.incarnation is None else str(replica.incarnation)
    yield "heard", "" if replica.heard_age_s is None else f"{ago(replica.heard_age_s)} ago"
    yield "breaker", replica.breaker
    yield "slow start", f"counts {replica.slowness:.1f} times" if replica.slowness > 1 else ""
    yield "longest prompt", "" if replica.max_model_len is None else count(replica.max_model_len, "token")
    yield "tokenizer", replica.tokenizer or ""
    yield "keys apart", replica.isolation or ""


def _work(replica: Replica, rates: Rates | None) -> Pairs:
    load = replica.load
    yield "running, waiting", f"{load.running:,}, {load.waiting:,}"
    yield "of this router", f"{count(load.in_flight, 'request')} under way, {replica.served.requests:,} answered"
    yield "queue", count(load.queued_tokens, "prompt token")
    yield "prefills", f"{short(load.prefill_tokens_per_s)} tokens/s when it does" if load.prefill_tokens_per_s else ""
    if rates is not None:
        yield (
            "of late",
            (
                f"{rate(rates.requests_per_s)} requests/s, {rate(rates.prompt_tokens_per_s)} prompt tokens/s, "
                f"{rate(rates.prefill_tokens_per_s)} of them to compute"
            ),
        )


def _cache(replica: Replica, rates: Rates | None) -> Pairs:
    blocks = replica.index.blocks
    size = f" of {replica.block_size}" if replica.block_size else ""
    held = ", ".join(f"{number:,} in {medium}" for medium, number in blocks.items())
    yield f"blocks{size}", held or "none"
    yield "tokens", short(cached_tokens(replica)) if replica.block_size else ""
    total = replica.load.total_blocks
    yield "use", f"{percent(cache_use(replica))} of {total:,} blocks" if total else ""
    empty = replica.load.empty_tokens
    yield "empty", "" if empty is None else f"{short(empty)} tokens"
    if rates is not None and rates.hit is not None:
        yield "hits of late", f"{percent(rates.hit)} of the prompt tokens"
    served = replica.served
    if served.prompt_tokens:
        yield (
            "hits in all",
            f"{served.matched_tokens / served.prompt_tokens:.0%} of {short(served.prompt_tokens)} tokens",
        )
    yield "predictions right", f"{replica.index.accuracy:.2%} of the last 1,000"


def _events(replica: Replica, rates: Rates | None) -> Pairs:
    events = replica.events
    if events is None:
        yield "stream", "none is followed: what it holds is guessed by what was sent there"
        return
    yield "stream", "connected" if events.connected else "not connected"
    yield "last batch", f"number {events.seq:,}" if events.seq >= 0 else "none yet"
    yield "last event", "" if events.last_event_age_s is None else f"{ago(events.last_event_age_s)} ago"
    yield "of late", f"{rate(rates.batches_per_s)} batches/s" if rates is not None else ""
    yield "behind by", count(events.lag_batches, "batch").replace("batchs", "batches")
    yield "gaps, lost batches", f"{events.gaps:,}, {events.lost_batches:,}"
    yield "replays, snapshots", f"{events.replays:,}, {events.snapshots:,}"
    yield "restarts, reconnects", f"{events.restarts:,}, {events.reconnects:,}"
    yield "digests differed", f"{events.digest_mismatches:,}"
    yield "not exact because", replica.inexact or ""


def _last_decisions(name: str, decisions: Sequence[Decision]) -> list[Text]:
    mine = [one for one in decisions if one.chosen == name][:LAST]
    return titled(
        "Last decisions for it",
        (
            (
                f"{clock(one.ts)} {one.prompt_tokens:,}",
                f"{tokens_or_none(one.predicted_cached_tokens)} predicted, "
                f"{tokens_or_none(one.reported_cached_tokens)} reported, {reason_for(one)}",
            )
            for one in mine
        ),
    )


# ---- a prefix


def of_prefix(branch: Branch, width: int) -> list[Text]:
    prefix = branch.prefix
    end = prefix.begin + prefix.tokens
    return [
        Text(f"Tokens {prefix.begin:,} to {end:,} of {count(prefix.prompts, 'prompt')}", "bold"),
        Text(),
        *titled("How it is used", _use(prefix)),
        *_texts(branch, width),
    ]


def _use(prefix: Prefix) -> Pairs:
    yield "model", prefix.model
    yield "matched", "exactly" if prefix.exact else "approximately: by bytes, not by tokens"
    yield "last prompt", f"{ago(prefix.idle_s)} ago"
    named = ", ".join(sorted(prefix.replicas, key=natural)) or "nobody"
    more = prefix.held_by - len(prefix.replicas)
    yield "held by", f"{named} and {more:,} more" if more > 0 else named
    yield "a cache saves", f"{count(saved_tokens(prefix), 'token')} of these prompts"
    yield "goes on as", f"{count(len(prefix.below), 'prefix')}".replace("prefixs", "prefixes") if prefix.below else ""


def _texts(branch: Branch, width: int) -> list[Text]:
    """From the beginning of the prompt, each run where it begins."""
    if branch.prefix.text is None:
        return [Text("No text is kept; start the router with --show-prompts to see it.", "dim")]
    lines = [Text("How it begins", "bold")]
    for run in (*branch.above, branch.prefix):
        style = "" if run is branch.prefix else "dim"
        wrapped = textwrap.wrap(text_of(run), max(20, width - 12)) or [""]
        lines += [
            Text(f"{f'{run.begin:,}' if not number else '':>9}  {part}", style) for number, part in enumerate(wrapped)
        ]
    return lines


# ---- a decision


def of_decision(decision: Decision, width: int) -> list[Text]:
    return [
        Text.assemble((printable(decision.chosen or "nobody"), "bold"), f": {printable(reason_for(decision))}"),
        Text(),
        *titled("The request", _request(decision)),
        *titled("Cached tokens", _prediction(decision)),
        *titled("Times", _times(decision)),
        *_candidates(decision, width),
    ]


def _request(decision: Decision) -> Pairs:
    yield "id", decision.request_id
    yield "at", clock(decision.ts)
    yield "model", decision.model
    yield "prompt", f"{'' if decision.exact else 'about '}{count(decision.prompt_tokens, 'token')}"
    yield "status", str(decision.status) if decision.status else "none: the client left"
    yield "policy", decision.policy
    yield "retries, resumes", f"{decision.retries}, {decision.resumes}" if decision.retries or decision.resumes else ""


def _prediction(decision: Decision) -> Pairs:
    yield "predicted", tokens_or_none(decision.predicted_cached_tokens)
    reported = tokens_or_none(decision.reported_cached_tokens)
    yield "reported", f"{reported}, less than predicted" if is_mispredicted(decision) else reported


def _times(decision: Decision) -> Pairs:
    yield "first token, estimate", duration(decision.estimated_ttft_s)
    yield "first token", duration(decision.ttft_s)
    yield "whole answer", duration(decision.duration_s)
    yield "waited for room", duration(decision.waited_s) if decision.waited_s else ""


def _candidates(decision: Decision, width: int) -> list[Text]:
    """The cheapest first. Costs are as they were when it was decided."""
    if not decision.candidates:
        return []
    longest = min(max(len(one.name) for one in decision.candidates), max(8, width - 30))
    lines = [
        Text("Candidates", "bold"),
        Text(f"    {'replica':<{longest}}{'cached':>10}{'cost':>12}", "dim"),
    ]
    for one in sorted(decision.candidates, key=_by_cost):
        chosen = one.name == decision.chosen
        cost = "cannot" if one.cost_s is None else duration(one.cost_s)
        name = printable(one.name)[:longest]
        lines.append(
            Text(
                f"  {'>' if chosen else ' '} {name:<{longest}}{one.matched_tokens:>10,}{cost:>12}",
                "bold green" if chosen else "dim" if one.cost_s is None else "",
            )
        )
    return lines


def _by_cost(one: Considered) -> tuple[float, list[tuple[int, str]]]:
    return math.inf if one.cost_s is None else one.cost_s, natural(one.name)
