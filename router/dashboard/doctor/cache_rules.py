"""Rules about a replica's cache: too small, too full, disabled, or unused. Each threshold has a reason."""

from collections.abc import Iterator

from engines import profile_of
from router.dashboard.doctor.figures import Diagnosis, Figures, ReplicaFigures

ENOUGH_PROMPTS = 10  # fewer prompts say little
ENOUGH_MISSES = 50  # fewer prompts may be unrelated by chance
FULL = 0.95  # a cache in use fills and stays full: below that hardly anything is evicted
REPLACED_PER_MINUTE = 1.0  # the whole cache each minute: few sessions send their next turn sooner
NEW_SALTS = 0.5  # share of prompts with a new salt: most cannot hit
LOST = 0.2  # share of prompt tokens that memory, or another choice, would save: less is not worth it
FEW_HITS = 0.1  # unrelated prompts share as much through a common template
BUSY_PER_S = 1.0  # prompts; a quiet replica without hits costs nothing
OPERATING_POINT = 0.9  # above 85 to 90 % a burst finds no room, and requests are preempted
PREEMPTED = 0.01  # share of prompts, each of which is computed again
LEAST_PREEMPTED = 2  # one may be chance
BILLED = 0.2  # share of prompts: with less, other prompts miss too
TAILS = 0.25  # share of prompt tokens in partial blocks: a quarter for prompts of two blocks
OFF_TOKENS = 4096  # computed without caching a block: hardly all from prompts shorter than a block
_LARGER = (
    "enlarge the cache (--num-blocks or --kv-cache-gb; vLLM: --gpu-memory-utilization), add replicas, "
    "or send similar prompts to fewer replicas"
)


def is_off(replica: ReplicaFigures) -> bool:
    own = replica.says
    if own.caching is not None:
        return not own.caching
    unused = not own.hit_tokens_ever and own.cached_blocks == 0 and not own.events_ever
    long_enough = replica.prompt_tokens >= 2 * replica.block_tokens * replica.prompts
    return unused and long_enough and own.prompt_tokens_ever >= OFF_TOKENS


def tail_share(replica: ReplicaFigures) -> float:
    """The share of prompt tokens in partial blocks; 0: unknown."""
    own, size = replica.says, replica.block_tokens
    if not size or not replica.prompt_tokens:
        return 0.0
    if own.query_blocks is not None and own.query_tokens:
        return max(0.0, 1 - own.query_blocks * size / own.query_tokens)
    mean_tokens = replica.prompt_tokens / max(1.0, replica.prompts)
    return min(1.0, size / 2 / mean_tokens)  # half a block per prompt on average


def misses(replica: ReplicaFigures, figures: Figures) -> Iterator[Diagnosis]:
    """Explain few hits by one finding: the first cause that its figures show."""
    own, told, prompts = replica.says, replica.told, replica.prompts
    hits, evicted = replica.hit_share, replica.evicted_share
    has_few_hits = prompts >= ENOUGH_PROMPTS and hits is not None and hits < FEW_HITS
    evicted_per_s = (own.evicted_blocks or 0.0) / figures.window_s
    is_full = (own.full or 0.0) >= FULL and evicted_per_s > 0
    replaced_per_minute = evicted_per_s * 60 / own.total_blocks if own.total_blocks else 0.0
    evictions: dict[str, float | str] = {"cache_full": own.full or 0.0, "hit_share": hits or 0.0}
    evictions["evicted_blocks_per_s"] = evicted_per_s
    if evicted is not None:
        kept = told.kept_tokens / max(1, told.evicted_tokens)
        evictions |= {"evicted_share": evicted, "of_these_kept_by_one_replica": kept}
        if speed := told.prefill_tokens_per_s:
            evictions["gpu_s_per_hour_at_most"] = told.evicted_tokens / speed * 3600 / figures.window_s
    if is_off(replica):
        yield Diagnosis(
            "caching-off",
            "its metrics say that prefix caching is off"
            if own.caching is False
            else "it has computed prompts, but never cached a block or had a hit",
            "start it with --enable-prefix-caching (SGLang: without --disable-radix-cache)",
            {"prompt_tokens_ever": own.prompt_tokens_ever, "cached_blocks": own.cached_blocks or 0},
        )
    elif replica.salted_anew_share >= NEW_SALTS:
        return  # `salt-per-request` says it
    elif has_few_hits and replica.billed_share >= BILLED:
        yield Diagnosis(
            "billing-line",
            "its prompts begin with Claude Code's billing line, which changes with every request, so they cannot hit",
            "set CLAUDE_CODE_ATTRIBUTION_HEADER=0 where Claude Code runs, or use an engine that leaves the line out "
            "(warmroute's, or a current vLLM)",
            {"billed_share": replica.billed_share, "hit_share": hits or 0.0},
        )
    elif (
        has_few_hits
        and is_full
        and replaced_per_minute >= REPLACED_PER_MINUTE
        and (evicted is None or evicted >= LOST)  # only a router knows which prompts come again
    ):
        what, turn = "prompts come again, but their blocks have been evicted by then", _LARGER
        if evicted is None:
            what = (
                "its cache is full and always being replaced, with few hits: it is too small, or no prompts are alike"
            )
            turn = "ask a router, which knows the prompts that come again (--router), or " + _LARGER
        yield Diagnosis("thrashing", what, turn, evictions | {"replaced_per_minute": replaced_per_minute})
    elif prompts >= ENOUGH_PROMPTS and (is_full or replica.own is None) and (evicted or 0.0) >= LOST:
        yield Diagnosis(
            "cache-too-small",
            "the prompts that come again need more blocks than the cache holds",
            _LARGER
            + "; `warmroute size` shows how much fits in memory, `warmroute simulate` how many more hits that brings",
            evictions,
        )
    elif has_few_hits and prompts >= max(ENOUGH_MISSES, BUSY_PER_S * figures.window_s) and tail_share(replica) < TAILS:
        yield _low_hits(replica, figures)


def _low_hits(replica: ReplicaFigures, figures: Figures) -> Diagnosis:
    router, usage, told = figures.router, replica.says.usage, replica.told
    evidence = {"prompts_per_s": replica.prompts / figures.window_s, "hit_share": replica.hit_share, "kv_usage": usage}
    known: dict[str, float | str] = {name: value for name, value in evidence.items() if value is not None}
    missed = told.elsewhere_tokens / told.prompt_tokens if told.prompt_tokens else 0.0
    if missed >= LOST:
        return Diagnosis(
            "low-hits",
            "it is busy and has few cache hits: other replicas held the prefixes of its prompts",
            f"route by prefix: --policy cost instead of {router.policy if router else 'another'}",
            known | {"held_elsewhere_share": missed},
        )
    return Diagnosis(
        "low-hits",
        "it is busy and has few cache hits: its prompts share no prefixes",
        "put shared content first (instructions, tools, documents), and changing content last (times, names, ids)",
        known,
    )


def pressure(replica: ReplicaFigures, _: Figures) -> Iterator[Diagnosis]:
    """Find what its running requests, and the lengths of prompts, do to its cache."""
    own, routed, prompts = replica.says, replica.routed, replica.prompts
    usage, preempted, tails = own.usage, own.preemptions or 0.0, tail_share(replica)
    was_empty = routed is not None and min(routed.busy, default=0.0) <= (own.running or 0.0)  # its queue, in between
    if usage is not None and usage >= OPERATING_POINT:
        yield Diagnosis(
            "kv-nearly-full",
            "running requests hold nearly all of its KV cache: above 85 to 90 %, a burst finds no room",
            "run fewer requests at once (--max-num-seqs, the router's --replica-limit), add replicas, or enlarge the "
            "cache",
            {"kv_usage": usage, "blocks": own.total_blocks},
        )
    elif usage is not None and own.waiting and own.running and not was_empty:
        yield Diagnosis(
            "too-few-at-once",
            f"requests wait in its queue although its KV cache has room: it runs at most {own.running:.0f} at once",
            f"let it run more at once ({profile_of(own.engine).batch_option}), or add replicas",
            {"running": own.running, "waiting": own.waiting, "kv_usage": usage},
        )
    if preempted >= max(LEAST_PREEMPTED, PREEMPTED * prompts):
        yield Diagnosis(
            "preemptions",
            "running requests lost their blocks to others, and were computed again",
            "run fewer requests at once (--max-num-seqs), enlarge the cache, or add replicas",
            {"preemptions": preempted, "prompts": prompts},
        )
    if tails >= TAILS and prompts >= ENOUGH_PROMPTS and not is_off(replica):
        mean_tokens = replica.prompt_tokens / prompts
        yield Diagnosis(
            "prompts-not-block-aligned",
            "prompts are shorter than a block, so they are not cached"
            if mean_tokens < replica.block_tokens
            else "much of each prompt is in its last block, which is not full and cannot be cached",
            "choose a smaller --block-size, or put short prompts behind a longer shared prefix",
            {"block_tokens": replica.block_tokens, "mean_prompt_tokens": mean_tokens, "unfilled_share": tails},
        )
