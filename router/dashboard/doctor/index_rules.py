"""Rules about the router's index of a replica: events missing, late or lost, and wrong predictions."""

from collections.abc import Iterator

from engines import profile_of
from router.dashboard.doctor.cache_rules import is_off
from router.dashboard.doctor.figures import Diagnosis, Figures, ReplicaFigures, RouterFigures, RoutingFigures

LAG_BATCHES = 20  # this many at every reading are a few seconds of an engine's steps
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


def knowledge(replica: ReplicaFigures, _: Figures) -> Iterator[Diagnosis]:
    """Say by one finding why the router does not know what the replica has cached."""
    routed, told, off = replica.routed, replica.told, is_off(replica)
    missing = replica.says.sends_events is False if routed is None else told.available and not told.has_events
    if missing and not off:
        what = "it sends no events: a router can only estimate what it has cached"
        if routed is not None:
            why = f": {routed.inexact}" if routed.inexact else ""
            what = f"the router follows no events of this replica, and estimates what it has cached{why}"
        evidence: dict[str, float | str] = {"engine": replica.engine, "state": routed.state if routed else "unknown"}
        yield Diagnosis("no-events", what, profile_of(replica.engine).events_advice, evidence)
    if not replica.is_sent_requests:
        return
    yield from _stream(told)
    often = told.predictions >= PREDICTIONS and told.wrong_predictions >= WRONG * told.predictions
    if told.overclaim is not None or told.honesty < TRUSTED:
        yield Diagnosis(
            "false-claims",
            f"its events cannot be true: {told.overclaim}"
            if told.overclaim is not None
            else "its answers keep reporting far fewer cached tokens than its events claim, so that it gets fewer "
            "requests",
            "check that the events are this replica's own (--replica url=URL,events=tcp://HOST:PORT), that they "
            "include removed blocks, and that its model and block size are those of the router; then restart it",
            {"honesty": told.honesty, "blocks_known": told.index_blocks, "why": told.overclaim or ""},
        )
    elif told.state in PARTIAL:
        if told.has_events:
            yield Diagnosis(
                "index-inexact",
                f"the router knows only part of its cache: {told.inexact or told.state}",
                "give the router its replay socket (replay=tcp://HOST:PORT; vLLM: replay_endpoint), its model's name "
                "and block size, or POST /replicas/NAME/resync",
                {"state": told.state, "why": told.inexact or "", "blocks_known": told.index_blocks},
            )
    elif not off and told.lag_batches < LAG_BATCHES and (often or told.resyncs):
        yield Diagnosis(
            "wrong-predictions",
            "it reports a different number of cached blocks than its events predict",
            "give the router the tokenizer and chat template that the replica uses (--model-dir, --chat-template)",
            {
                "predictions": told.predictions,
                "wrong": told.wrong_predictions,
                "wrong_blocks": told.wrong_blocks,
                "resyncs": told.resyncs,
            },
        )


def _stream(told: RoutingFigures) -> Iterator[Diagnosis]:
    """Find what is wrong with its event stream."""
    if told.lag_batches >= LAG_BATCHES:
        yield Diagnosis(
            "event-lag",
            "its events arrive late: the router decides by an outdated view of its cache",
            "check the router's CPU and the network between them; run it on a faster core, or with fewer replicas",
            {"lag_batches": told.lag_batches},
        )
    if told.lost_batches >= LOST_BATCHES or told.gaps >= GAPS or told.digest_mismatches:
        yield Diagnosis(
            "event-losses",
            "some of its events are lost on the way" + ("" if told.lost_batches else ", and had to be requested again"),
            "check the network between them; enlarge the replica's replay buffer (vLLM: buffer_steps) and its "
            "send queue (hwm), and give the router the replay socket",
            {name: getattr(told, name) for name in ("lost_batches", "gaps", "repairs", "digest_mismatches")},
        )
    if told.unknown:
        names = sorted(told.unknown)
        shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
        yield Diagnosis(
            "unknown-events",
            f"its events have parts that the router does not read: {shown}",
            "look whether a newer version of the router reads them: they may change what its cache holds",
            {"unknown": shown, "times": sum(told.unknown.values())},
        )


def prompts(figures: Figures) -> Iterator[Diagnosis]:
    """Find prompts that the router does not build as the replicas do."""
    router = figures.router or RouterFigures()
    if router.differing:
        one, more = router.differing[0], len(router.differing) - 1
        others = f"; {more} more shapes differ" if more else ""
        texts = {"here": one.here, "there": one.there} if one.here or one.there else {}
        yield Diagnosis(
            "prompts-differ",
            f"{one.replica} builds another prompt of some requests to {one.model} than the router: they are matched by "
            f"their bytes{others}",
            "give the router the replica's own chat template (--chat-template MODEL=FILE), and compare the two texts",
            {"shape": one.shape, "token": one.token, **texts},
        )
    count = sum(router.approximate.values())
    # Exact prompts would not help where no replica has events: there are no tokens to match.
    has_tokens = any(one.routed is not None and one.told.has_events for one in figures.replicas)
    if not count or count < APPROXIMATE * router.requests or not has_tokens:
        return
    reason = max(router.approximate, key=lambda why: router.approximate[why])
    if reason == SHAPE and router.differing:
        return  # `prompts-differ` says more
    what = "prompts are matched by their bytes, not by their tokens"
    turn = "give the router the model's tokenizer: --model-dir MODEL=DIR"
    if MISMATCH in reason:
        what = "the router's tokenizer differs from the replicas': prompts are matched by their bytes"
        turn = "give the router the replicas' own tokenizer and chat template: --model-dir MODEL=DIR"
    yield Diagnosis(
        "approximate-prompts", what, turn, {"prompts": count, "requests": router.requests, "reason": reason}
    )
