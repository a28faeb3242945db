"""Rules about a replica's cache: too small, too full, disabled, or unused. Each threshold has a reason.

One cause, one finding: a rule is silent if a more specific rule explains the figures.
"""

from engines import profile_of
from router.dashboard.doctor.figures import Figures, ReplicaFigures
from router.dashboard.doctor.findings import Diagnosis

ENOUGH_PROMPTS = 10  # fewer prompts say little
ENOUGH_MISSES = 50  # fewer prompts may be unrelated by chance
FULL = 0.95  # a cache in use fills and stays full: below that hardly anything is evicted
REPLACED_PER_MINUTE = 1.0  # the whole cache each minute: few sessions send their next turn sooner
RESENT = 0.2  # a larger cache gains too little to pay for if the share is less
LOST = 0.2  # share of prompt tokens that a larger cache would save: less is not worth the memory
FEW_HITS = 0.1  # unrelated prompts share as much through a common template
BUSY_PER_S = 1.0  # prompts; a quiet replica without hits costs nothing
OPERATING_POINT = 0.9  # above 85 to 90 % a burst finds no room, and requests are preempted
PREEMPTED = 0.01  # share of prompts, each of which is computed again
LEAST_PREEMPTED = 2  # one may be chance
BILLED = 0.2  # share of prompts: with less, other prompts miss too
TAILS = 0.25  # share of prompt tokens in partial blocks: a quarter for prompts of two blocks
OFF_TOKENS = 4096  # computed without caching a block: hardly all from prompts shorter than a block


# ---- causes that other rules report


def is_off(replica: ReplicaFigures) -> bool:
    own = replica.says
    if own.caching is not None:
        return not own.caching
    unused = not own.hit_tokens_ever and own.cached_blocks == 0 and not own.events_ever
    long_enough = replica.prompt_tokens >= 2 * replica.block_tokens * replica.prompts
    return unused and long_enough and own.prompt_tokens_ever >= OFF_TOKENS


def salts_differ(replica: ReplicaFigures) -> bool:
    """Tell whether many prompts have a new salt, so that they cannot hit."""
    return replica.salted_anew_share >= 0.5


def is_billed(replica: ReplicaFigures) -> bool:
    """Tell whether many prompts begin with Claude Code's billing line, and the engine shows it to the model."""
    hits = replica.hit_share
    return replica.prompts >= ENOUGH_PROMPTS and hits is not None and hits < FEW_HITS and replica.billed_share >= BILLED


def hits_nothing(replica: ReplicaFigures) -> bool:
    """Tell whether another rule says why prompts cannot hit."""
    return is_off(replica) or salts_differ(replica) or is_billed(replica)


def tail_share(replica: ReplicaFigures) -> float | None:
    """The share of prompt tokens in partial blocks; None: unknown."""
    own, size = replica.says, replica.block_tokens
    if not size or not replica.prompt_tokens:
        return None
    if own.query_blocks is not None and own.query_tokens:
        return max(0.0, 1 - own.query_blocks * size / own.query_tokens)
    mean_tokens = replica.prompt_tokens / max(1.0, replica.prompts)
    return min(1.0, size / 2 / mean_tokens)  # half a block per prompt on average


def is_too_small(replica: ReplicaFigures) -> bool:
    """Tell whether many prompt tokens were sent there before, and have been evicted."""
    if replica.resent_share is None or replica.hit_share is None:
        return False
    return is_full(replica) and replica.resent_share - replica.hit_share >= LOST


def is_full(replica: ReplicaFigures) -> bool:
    return (replica.says.full or 0.0) >= FULL and bool(replica.says.evicted_blocks)


def replaced_per_minute(replica: ReplicaFigures, figures: Figures) -> float:
    own = replica.says
    return (own.evicted_blocks or 0.0) / own.total_blocks * 60 / figures.window_s if own.total_blocks else 0.0


def is_thrashing(replica: ReplicaFigures, figures: Figures) -> bool:
    hits, resent = replica.hit_share, replica.resent_share
    return (
        replica.prompts >= ENOUGH_PROMPTS
        and is_full(replica)
        and replaced_per_minute(replica, figures) >= REPLACED_PER_MINUTE
        and hits is not None
        and hits < FEW_HITS
        and not is_billed(replica)
        and (resent is None or resent >= RESENT)  # only a router knows which prompts come again
    )


def evictions(replica: ReplicaFigures, figures: Figures) -> dict[str, float | str]:
    own, resent = replica.says, replica.resent_share
    return {
        "cache_full": own.full or 0.0,
        "hit_share": replica.hit_share or 0.0,
        "evicted_blocks_per_s": (own.evicted_blocks or 0.0) / figures.window_s,
        **({} if resent is None else {"resent_share": resent}),
    }


# ---- the rules


_LARGER = (
    "enlarge the cache (--num-blocks or --kv-cache-gb; vLLM: --gpu-memory-utilization), add replicas, "
    "or send similar prompts to fewer replicas"
)


def thrashing(replica: ReplicaFigures, figures: Figures) -> Diagnosis | None:
    if not is_thrashing(replica, figures):
        return None
    what, turn = "prompts come again, but their blocks have been evicted by then", _LARGER
    if replica.resent_share is None:
        what = "its cache is full and always being replaced, with few hits: it is too small, or no prompts are alike"
        turn = "ask a router, which knows the prompts that come again (--router), or " + _LARGER
    replaced: dict[str, float | str] = {"replaced_per_minute": replaced_per_minute(replica, figures)}
    return Diagnosis(what, turn, evictions(replica, figures) | replaced)


def cache_too_small(replica: ReplicaFigures, figures: Figures) -> Diagnosis | None:
    if replica.prompts < ENOUGH_PROMPTS or not is_too_small(replica):
        return None
    if is_thrashing(replica, figures) or hits_nothing(replica):
        return None
    return Diagnosis(
        "the prompts that come again need more blocks than the cache holds",
        _LARGER
        + "; `warmroute size` shows how much fits in memory, `warmroute simulate` how many more hits that brings",
        evictions(replica, figures),
    )


def billing_line(replica: ReplicaFigures, _: Figures) -> Diagnosis | None:
    if not is_billed(replica) or salts_differ(replica) or is_off(replica):
        return None
    return Diagnosis(
        "its prompts begin with Claude Code's billing line, which changes with every request, so they cannot hit",
        "set CLAUDE_CODE_ATTRIBUTION_HEADER=0 where Claude Code runs, or use an engine that leaves the line out "
        "(warmroute's, or a current vLLM)",
        {"billed_share": replica.billed_share, "hit_share": replica.hit_share or 0.0},
    )


def low_hits(replica: ReplicaFigures, figures: Figures) -> Diagnosis | None:
    hits, prompts_per_s = replica.hit_share, replica.prompts / figures.window_s
    if hits is None or hits >= FEW_HITS or prompts_per_s < BUSY_PER_S or replica.prompts < ENOUGH_MISSES:
        return None
    if hits_nothing(replica) or is_thrashing(replica, figures) or is_too_small(replica):
        return None  # other rules say it
    if (tail_share(replica) or 0.0) >= TAILS:
        return None
    evidence: dict[str, float | str] = {"prompts_per_s": prompts_per_s, "hit_share": hits}
    if replica.says.usage is not None:
        evidence["kv_usage"] = replica.says.usage
    router = figures.router
    missed = router.missed_tokens / router.chosen_tokens if router and router.chosen_tokens else 0.0
    if missed >= RESENT:
        return Diagnosis(
            "it is busy and has few cache hits: other replicas held the prefixes of its prompts",
            f"route by prefix: --policy cost instead of {router.policy if router else 'another'}",
            evidence | {"held_elsewhere_share": missed},
        )
    if replica.resent_share is not None:
        evidence["resent_share"] = replica.resent_share
    return Diagnosis(
        "it is busy and has few cache hits: its prompts share no prefixes",
        "put shared content first (instructions, tools, documents), and changing content last (times, names, ids)",
        evidence,
    )


def kv_nearly_full(replica: ReplicaFigures, _: Figures) -> Diagnosis | None:
    own = replica.says
    if own.usage is None or own.usage < OPERATING_POINT:
        return None
    return Diagnosis(
        "running requests hold nearly all of its KV cache: above 85 to 90 %, a burst finds no room",
        "run fewer requests at once (--max-num-seqs, the router's --replica-limit), add replicas, or enlarge the cache",
        {"kv_usage": own.usage, "blocks": own.total_blocks},
    )


def too_few_at_once(replica: ReplicaFigures, _: Figures) -> Diagnosis | None:
    own, routed = replica.says, replica.routed
    if not own.waiting or not own.running or own.usage is None or own.usage >= OPERATING_POINT:
        return None
    if routed is not None and (not routed.busy or min(routed.busy) <= own.running):
        return None  # its queue was empty in between
    setting = profile_of(own.engine).batch_option
    return Diagnosis(
        f"requests wait in its queue although its KV cache has room: it runs at most {own.running:.0f} at once",
        f"let it run more at once ({setting}), or add replicas",
        {"running": own.running, "waiting": own.waiting, "kv_usage": own.usage},
    )


def preemptions(replica: ReplicaFigures, _: Figures) -> Diagnosis | None:
    count = replica.says.preemptions or 0.0
    if count < LEAST_PREEMPTED or count < PREEMPTED * replica.prompts:
        return None
    return Diagnosis(
        "running requests lost their blocks to others, and were computed again",
        "run fewer requests at once (--max-num-seqs), enlarge the cache, or add replicas",
        {"preemptions": count, "prompts": replica.prompts},
    )


def prompts_not_block_aligned(replica: ReplicaFigures, _: Figures) -> Diagnosis | None:
    tails = tail_share(replica)
    if tails is None or tails < TAILS or replica.prompts < ENOUGH_PROMPTS or is_off(replica):
        return None
    mean_tokens = replica.prompt_tokens / replica.prompts
    short = mean_tokens < replica.block_tokens
    return Diagnosis(
        "prompts are shorter than a block, so they are not cached"
        if short
        else "much of each prompt is in its last block, which is not full and cannot be cached",
        "choose a smaller --block-size, or put short prompts behind a longer shared prefix",
        {"block_tokens": replica.block_tokens, "mean_prompt_tokens": mean_tokens, "unfilled_share": tails},
    )


def caching_off(replica: ReplicaFigures, _: Figures) -> Diagnosis | None:
    if not is_off(replica):
        return None
    own = replica.says
    return Diagnosis(
        "its metrics say that prefix caching is off"
        if own.caching is False
        else "it has computed prompts, but never cached a block or had a hit",
        "start it with --enable-prefix-caching (SGLang: without --disable-radix-cache)",
        {"prompt_tokens_ever": own.prompt_tokens_ever, "cached_blocks": own.cached_blocks or 0},
    )
