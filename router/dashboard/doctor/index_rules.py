"""Rules about the router's index of a replica: events missing, late or lost, and wrong predictions."""

from engines import profile_of
from router.dashboard.doctor.cache_rules import is_off
from router.dashboard.doctor.figures import Figures, ReplicaFigures
from router.dashboard.doctor.findings import Diagnosis

LAG_BATCHES = 20  # so many at every reading are a few seconds of an engine's steps
LOST_BATCHES = 1  # the index stays wrong until the next snapshot
GAPS = 2  # one may be a hiccup of the network, and was repaired
TRUSTED = 1.0  # less means repeated wrong claims that no event explains
WRONG = 0.05  # share of predictions that no later event explains
PREDICTIONS = 20
SHOWN = 5  # names
PARTIAL = ("partial", "syncing")  # states
APPROXIMATE = 0.01  # share of prompts: some have parts without tokens (images)
MISMATCH = "the tokenizer here is not that of"
SHAPE = "shape"  # the reason of prompts whose shape is not verified


def no_events(replica: ReplicaFigures, _: Figures) -> Diagnosis | None:
    routed = replica.routed
    missing = replica.says.sends_events is False if routed is None else routed.available and not routed.has_events
    if not missing or is_off(replica):
        return None
    what = "it sends no events: a router can only estimate what it has cached"
    if routed is not None:
        why = f": {routed.inexact}" if routed.inexact else ""
        what = f"the router follows no events of this replica, and estimates what it has cached{why}"
    state = routed.state if routed else "unknown"
    return Diagnosis(what, profile_of(replica.engine).events_advice, {"engine": replica.engine, "state": state})


def false_claims(replica: ReplicaFigures, _: Figures) -> Diagnosis | None:
    routed = replica.told
    if not replica.is_sent_requests or not _claims_falsely(replica):
        return None
    return Diagnosis(
        f"its events cannot be true: {routed.overclaim}"
        if routed.overclaim is not None
        else "its answers keep reporting far fewer cached tokens than its events claim, so that it gets fewer requests",
        "check that the events are this replica's own (--replica url=URL,events=tcp://HOST:PORT), that they "
        "include removed blocks, and that its model and block size are those of the router; then restart it",
        {"honesty": routed.honesty, "blocks_known": routed.index_blocks, "why": routed.overclaim or ""},
    )


def _claims_falsely(replica: ReplicaFigures) -> bool:
    return replica.told.overclaim is not None or replica.told.honesty < TRUSTED


def index_inexact(replica: ReplicaFigures, _: Figures) -> Diagnosis | None:
    routed = replica.told
    if _claims_falsely(replica) or not replica.is_sent_requests or not routed.has_events:
        return None
    if routed.state not in PARTIAL:
        return None
    return Diagnosis(
        f"the router knows only part of its cache: {routed.inexact or routed.state}",
        "give the router its replay socket (replay=tcp://HOST:PORT; vLLM: replay_endpoint), its model's name and block "
        "size, or POST /replicas/NAME/resync",
        {"state": routed.state, "why": routed.inexact or "", "blocks_known": routed.index_blocks},
    )


def event_lag(replica: ReplicaFigures, _: Figures) -> Diagnosis | None:
    routed = replica.told
    if not replica.is_sent_requests or routed.lag_batches < LAG_BATCHES:
        return None
    return Diagnosis(
        "its events arrive late: the router decides by an outdated view of its cache",
        "check the router's CPU and the network between them; run it on a faster core, or with fewer replicas",
        {"lag_batches": routed.lag_batches},
    )


def event_losses(replica: ReplicaFigures, _: Figures) -> Diagnosis | None:
    routed = replica.told
    is_complete = routed.lost_batches < LOST_BATCHES and routed.gaps < GAPS and not routed.digest_mismatches
    if is_complete or not replica.is_sent_requests:
        return None
    return Diagnosis(
        "some of its events are lost on the way" + ("" if routed.lost_batches else ", and had to be requested again"),
        "check the network between them; enlarge the replica's replay buffer (vLLM: buffer_steps) and its "
        "send queue (hwm), and give the router the replay socket",
        {name: getattr(routed, name) for name in ("lost_batches", "gaps", "repairs", "digest_mismatches")},
    )


def unknown_events(replica: ReplicaFigures, _: Figures) -> Diagnosis | None:
    unknown = replica.told.unknown
    if not replica.is_sent_requests or not unknown:
        return None
    names = sorted(unknown)
    shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
    return Diagnosis(
        f"its events have parts that the router does not read: {shown}",
        "look whether a newer version of the router reads them: they may change what its cache holds",
        {"unknown": shown, "times": sum(unknown.values())},
    )


def wrong_predictions(replica: ReplicaFigures, _: Figures) -> Diagnosis | None:
    routed = replica.told
    if is_off(replica) or not replica.is_sent_requests or _claims_falsely(replica):
        return None
    if routed.state in PARTIAL or routed.lag_batches >= LAG_BATCHES:
        return None  # that rule says why
    often = routed.predictions >= PREDICTIONS and routed.wrong_predictions >= WRONG * routed.predictions
    if not often and not routed.resyncs:
        return None
    return Diagnosis(
        "it reports a different number of cached blocks than its events predict",
        "give the router the tokenizer and chat template that the replica uses (--model-dir, --chat-template)",
        {
            "predictions": routed.predictions,
            "wrong": routed.wrong_predictions,
            "wrong_blocks": routed.wrong_blocks,
            "resyncs": routed.resyncs,
        },
    )


def approximate_prompts(figures: Figures) -> Diagnosis | None:
    router = figures.router
    if router is None:
        return None
    count = sum(router.approximate.values())
    # Exact prompts would not help where no replica has events: there are no tokens to match.
    has_tokens = any(one.routed is not None and one.told.has_events for one in figures.replicas)
    if not count or count < APPROXIMATE * router.requests or not has_tokens:
        return None
    reason = max(router.approximate, key=lambda why: router.approximate[why])
    if reason == SHAPE and router.differing:
        return None  # `prompts_differ` says more
    if MISMATCH in reason:
        what = "the router's tokenizer differs from the replicas': prompts are matched by their bytes"
        turn = "give the router the replicas' own tokenizer and chat template: --model-dir MODEL=DIR"
    else:
        what = "prompts are matched by their bytes, not by their tokens"
        turn = "give the router the model's tokenizer: --model-dir MODEL=DIR"
    return Diagnosis(what, turn, {"prompts": count, "requests": router.requests, "reason": reason})


def prompts_differ(figures: Figures) -> Diagnosis | None:
    if figures.router is None or not figures.router.differing:
        return None
    one, more = figures.router.differing[0], len(figures.router.differing) - 1
    others = f"; {more} more shapes differ" if more else ""
    texts = {"here": one.here, "there": one.there} if one.here or one.there else {}
    return Diagnosis(
        f"{one.replica} builds another prompt of some requests to {one.model} than the router: they are matched by "
        f"their bytes{others}",
        "give the router the replica's own chat template (--chat-template MODEL=FILE), and compare the two texts",
        {"shape": one.shape, "token": one.token, **texts},
    )
