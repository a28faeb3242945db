"""Rules about a router and its replicas together: availability, load and refusals."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from router.dashboard.doctor.figures import DecisionSample, Diagnosis, Figures, ReplicaFigures, RouterFigures

REFUSED = 0.01  # share of requests: less is a burst
CROWDED = ("queue_full", "rate_limit_exceeded")  # error codes that mean too much load
TURN_S = 0.5  # the time of two load reports: routers that see the same report choose alike
CHOICES_IN_A_TURN = 8  # fewer may fall on one replica by chance
TURNS = 4
BUNCHED = 0.8  # share of a turn's choices on one replica that its cache does not explain
QUEUE_TOKENS = 2048  # half a second of prefill on a slow device: shorter queues mean nothing
QUEUE_READINGS = 5
QUEUE_CHANGES = 3  # changes of the replica with the longest queue; a hot replica stays the same
HOT_BUSY = 8.0  # concurrent requests: fewer do not wait
HOT_TIMES = 4.0  # the mean of the other replicas: cost gives a warm replica some more, but not as many
STALLED = ("its engine sleeps", "its engine computes nothing")  # how the router's reason begins then
STARVED = 0.2  # share of the time: below that a step is hardly late
LEAST_STARVED_S = 1.0  # within a short window a single wait would be such a share
SALTED_PROMPTS = 20
NEW_SALTS = 0.5  # a tenant's salt is new only once


def availability(replica: ReplicaFigures, figures: Figures) -> Iterator[Diagnosis]:
    routed, waited_s = replica.told, replica.says.cpu_wait_s or 0.0
    why = "" if routed.available else routed.why or ""
    if why.startswith(STALLED):
        yield Diagnosis(
            "engine-stalled",
            f"{why}; its server answers health checks all the same, so nobody else notices",
            "wake it (POST /wake_up) or end its pause (POST /resume) if somebody meant it; else its engine's process "
            "hangs: look at its log and restart it. The router sends it requests again once it computes",
            {"why": why},
        )
    elif why in ("draining", "it drains") or replica.says.draining:
        by_operator = routed.why == "draining"
        yield Diagnosis(
            "replica-draining",
            "it is draining: the other replicas get its share of the requests"
            + ("" if by_operator else "; the replica itself reports it"),
            "to end the drain: `warmroute drain --undo` in a fleet, POST /replicas/NAME/undrain at the router",
            {"by": "an operator" if by_operator else "itself"},
        )
    elif not routed.available:
        yield Diagnosis(
            "replica-down",
            f"it takes no requests: {why or 'the router gives no reason'}",
            "check its log (`warmroute logs` in a fleet), and whether the router can reach its address",
            {"why": why, "breaker": routed.breaker, "faults": routed.faults},
        )
    elif routed.faults or routed.restarts or routed.breaker != "closed":
        restarted = "; it restarted with an empty cache" if routed.restarts else ""
        yield Diagnosis(
            "replica-unsteady",
            f"it takes requests, but has failed within the last {figures.window_s:.0f} s{restarted}",
            "check its log and its memory for the cause; connect_timeout and breaker_faults say what counts as a fault",
            {"faults": routed.faults, "restarts": routed.restarts, "breaker": routed.breaker},
        )
    if routed.taken_names:
        name, base = next(iter(routed.taken_names.items()))
        others = f", and {len(routed.taken_names) - 1} more of its names" if len(routed.taken_names) > 1 else ""
        yield Diagnosis(
            "name-taken",
            f"it gets no requests for {name}{others}: replicas of the base model {base} have that name already",
            "give each adapter and each model a name of its own",
            {"name": name, "base_here": replica.model, "base_there": base},
        )
    if waited_s >= max(STARVED * figures.window_s, LEAST_STARVED_S):
        yield Diagnosis(
            "starved-of-cpu",
            "its engine could run and had no processor for much of the time, so that its tokens come late",
            "run fewer replicas or other programs on its machine, or raise the CPU limit of its container; "
            "on a Ray of yours, set RAY_worker_niceness=0 for `ray start`",
            {"without_cpu_share": min(1.0, waited_s / figures.window_s), "without_cpu_s": waited_s},
        )


def together(figures: Figures) -> Iterator[Diagnosis]:
    """Find what is wrong with the router, or its replicas side by side."""
    routed = [one.routed for one in figures.replicas if one.routed is not None]
    if figures.router is not None and not routed:
        turn = "name some with --replica or --replicas-file"
        yield Diagnosis("no-replicas", "the router knows no replicas", turn, {"replicas": 0})
    yield from _refusals(figures)
    requests = sum(one.requests for one in routed)
    salted, new = sum(one.salted for one in routed), sum(one.new_salts for one in routed)
    if salted >= SALTED_PROMPTS and new >= NEW_SALTS * max(salted, requests):
        yield Diagnosis(
            "salt-per-request",
            "prompts have new cache salts, so they cannot hit a cache",
            "let clients send one cache_salt for each tenant, or none; put keys that may share a cache in one group",
            {"requests": requests, "salted": salted, "new_salts": new},
        )
    by_model: dict[str, list[ReplicaFigures]] = defaultdict(list)
    for one in figures.replicas:
        if one.is_sent_requests:
            by_model[one.model].append(one)
    groups = [group for group in by_model.values() if len(group) > 1]
    yield from list(filter(None, (_hottest(replicas, figures.router) for replicas in groups)))[:1]
    choices = figures.router.choices if figures.router is not None and groups else None
    if evidence := _bunched(choices or ()) or next(filter(None, map(_oscillating, groups)), {}):
        yield Diagnosis(
            "herding",
            "requests all go to one replica, and then all to another: queues swing instead of being shared",
            "use --policy cost, have replicas report their load (warmroute's do), and run fewer routers side by side",
            evidence,
        )


def _refusals(figures: Figures) -> Iterator[Diagnosis]:
    router = figures.router
    by_code = {code: count for code, count in router.refused.items() if code in CROWDED and count} if router else {}
    # Refused to clients: a router retries at another replica in time.
    by_replica = {one.name: one.says.refused if one.routed is None else one.told.refused for one in figures.replicas}
    by_replica = {name: count for name, count in by_replica.items() if count}
    refused = sum(by_code.values()) + sum(by_replica.values())
    answered = router.requests if router else sum(one.prompts for one in figures.replicas)
    if not refused or refused < REFUSED * (answered + refused):
        return
    turn = "add replicas, or let more requests wait in each of them (max_waiting)"
    if by_code.get("rate_limit_exceeded", 0) > refused / 2:
        turn = "raise the key's limits (--api-keys; the error's param names the one), or slow its clients down"
    elif by_code:
        turn = "add replicas, or let more requests wait (--queue-size, --queue-timeout) or run (--replica-limit)"
    evidence: dict[str, float | str] = {"refused": refused, "requests": answered, **by_code, **by_replica}
    yield Diagnosis("requests-refused", "requests are refused with status 429", turn, evidence)


def _bunched(choices: Sequence[DecisionSample]) -> dict[str, float | str]:
    """Figures of turns that each sent nearly all requests to one, changing replica without a cached prefix."""
    turns: dict[int, Counter[str]] = defaultdict(Counter)
    for choice in choices:
        if not choice.cached:
            turns[int(choice.at_s // TURN_S)][choice.replica] += 1
    full = [turn for _, turn in sorted(turns.items()) if turn.total() >= CHOICES_IN_A_TURN]
    if len(full) < TURNS:
        return {}
    tops = [turn.most_common(1)[0] for turn in full]
    share = sum(count for _, count in tops) / sum(turn.total() for turn in full)
    if share < BUNCHED or _changes([name for name, _ in tops]) < QUEUE_CHANGES:
        return {}
    return {"turns_of_half_a_second": len(full), "of_each_on_one_replica": share}


def _oscillating(replicas: Sequence[ReplicaFigures]) -> dict[str, float | str]:
    """Figures of long queues at one, changing replica and hardly any elsewhere."""
    readings = list(zip(*(one.told.queued_tokens for one in replicas), strict=False))
    long = [reading for reading in readings if sum(reading) >= QUEUE_TOKENS]
    if len(long) < QUEUE_READINGS:
        return {}
    share = sum(max(reading) for reading in long) / sum(map(sum, long))
    changes = _changes([replicas[reading.index(max(reading))].name for reading in long])
    if share < BUNCHED or changes < QUEUE_CHANGES:
        return {}
    return {"readings": len(long), "queue_at_one_replica": share, "changes_of_that_replica": changes}


def _changes(names: Sequence[str]) -> int:
    return sum(one != other for one, other in pairwise(names))


def _hottest(replicas: Sequence[ReplicaFigures], router: RouterFigures | None) -> Diagnosis | None:
    readings = list(zip(*(one.told.busy for one in replicas), strict=False))
    if not readings:
        return None
    means = [sum(each) / len(readings) for each in zip(*readings, strict=True)]
    hottest = means.index(max(means))
    others = (sum(means) - means[hottest]) / (len(means) - 1)
    always = all(reading[hottest] == max(reading) for reading in readings)
    if not always or means[hottest] < HOT_BUSY or means[hottest] < HOT_TIMES * others:
        return None
    if router is not None and router.policy == "cost":  # this policy has weighed the queue there against the cache
        chosen = [one.cached for one in router.choices or () if one.replica == replicas[hottest].name]
        if 2 * sum(chosen) > len(chosen):
            return None
    return Diagnosis(
        "hot-replica",
        f"{replicas[hottest].name} is always far busier than the others",
        "use --policy cost, set --replica-limit, or spread its sessions over more values of x-session-id; "
        "a prefix that most requests share should be cached on more replicas",
        {"replica": replicas[hottest].name, "requests_there": means[hottest], "mean_of_the_others": others},
    )
