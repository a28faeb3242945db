"""How others place a request: each function takes a request and the replicas, and returns the chosen one's number.

They are written from published rules, with their defaults, and read only what their source knows. What all leave out:
health, retries, locality, LoRA, several routers, and halves of a request (prefill apart from decode).
Continuum (arXiv 2511.02230) is not among them: it keeps KV in the engine over a tool call, and places nothing.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from random import Random
from typing import NamedTuple, TypeAlias

from msgspec import Struct, field

from router.placement.policy import Ring


class Asked(NamedTuple):
    tokens: int
    blocks: Sequence[int]  # equal ones have equal blocks before them, too; the last may not be full
    block_tokens: int
    chance: Random  # it breaks ties
    session: str | None = None
    last: int | None = None  # the number of the replica that had the session's last request


class Seen(Struct, eq=False):
    """One replica as routers may know it; each rule reads what its source knows."""

    number: int
    rate: float = 8000.0  # prefill tokens/s, as configured
    # Counted by the router itself.
    in_flight: int = 0
    sent: int = 0
    pending_tokens: int = 0  # uncached tokens of requests without a first token
    live: Counter[int] = field(default_factory=Counter)  # blocks of requests in flight
    tree: dict[int, int] = field(default_factory=dict)  # all blocks ever sent, with the turn of their last use
    cold_turn: int = 0  # the turn of its last request that no cache had
    # By events: the tokens of this request that are cached, and these with what was sent and not confirmed yet.
    cached: float = 0.0
    expected: float = 0.0
    # By scraping its metrics.
    waiting: int = 0
    kv_used: float = 0.0

    def match(self, blocks: Sequence[int]) -> tuple[int, int]:
        """The number of first blocks that are in the tree, and the turn of the last one's last use."""
        matched = bisect_left(blocks, True, key=lambda block: block not in self.tree)
        return matched, self.tree[blocks[matched - 1]] if matched else 0


Choose: TypeAlias = Callable[[Asked, Sequence[Seen]], int]
_ring = cache(Ring)


def _hashed(key: str, numbers: Iterable[int]) -> int:
    """The first of the numbers on the key's walk of a ring that has 128 points for each."""
    return int(next(_ring(tuple(map(str, numbers))).walk(key)))


def _lowest(replicas: Sequence[Seen], chance: Random, cost: Callable[[Seen], float]) -> Seen:
    """Ties are broken at random."""
    costs = [cost(one) for one in replicas]
    least = min(costs)
    return chance.choice([one for one, its in zip(replicas, costs, strict=True) if its == least])


def lmetric(asked: Asked, replicas: Sequence[Seen], *, counts_queue: bool = False) -> int:
    """The lowest product of new tokens and requests in flight, this one included.

    Source: arXiv 2603.15202 (`counts_queue`: the reading that adds the tokens that wait for prefill);
    sgl-project/sglang@acaa759 sgl-model-gateway/src/policies/lmetric.rs; `lmetric-scorer` of llm-d-router, which
    counts what was sent as cached. Left out: its detector of cases in which the product misleads.
    """

    def cost(one: Seen) -> tuple[float, int, float]:
        new = asked.tokens - one.expected + one.pending_tokens * counts_queue
        return new * (one.in_flight + 1), one.in_flight, new

    return min(replicas, key=cost).number


def sglang(asked: Asked, replicas: Sequence[Seen], *, keeps_sessions: bool = False) -> int:
    """`cache_aware`: the longest match in the router's own tree if it is over 30 % and loads are balanced.

    Source: lightseekorg/smg@73da68c (sglang-router's home) model_gateway/src/policies/cache_aware.rs over HTTP, with
    the command's defaults: imbalanced is a difference over 64 requests and a ratio over 1.5. Left out: the tree's
    eviction, which begins at 2^26 characters for each worker. Blocks stand for characters.
    `keeps_sessions`: if balanced, a known session goes where its last request went, as in vllm-project/router@16917f4
    src/policies/cache_aware.rs, src/main.rs (same defaults). Left out: sessions forgotten after an hour.
    """
    least = min(replicas, key=lambda one: (one.in_flight, one.sent, one.number))
    most = max(one.in_flight for one in replicas)
    if most - least.in_flight > 64 and most > 1.5 * least.in_flight:
        return least.number
    if keeps_sessions and asked.last is not None and any(one.number == asked.last for one in replicas):
        return asked.last
    (matched, _), number = max((one.match(asked.blocks), one.number) for one in replicas)
    return number if matched / len(asked.blocks) > 0.3 else least.number


vllm_router = partial(sglang, keeps_sessions=True)


def vllm_router_hash(asked: Asked, replicas: Sequence[Seen]) -> int:
    """`consistent_hash` of the session, else of the whole request.

    Source: vllm-project/router@080589a src/policies/consistent_hash.rs, hash_key.rs. Left out: its own hash function
    and 160 points a worker.
    """
    key = f"request:{asked.blocks[-1]}" if asked.session is None else asked.session
    return _hashed(key, (one.number for one in replicas))


class DualMap:
    """Two candidates by hashes of a prefix: the one with more cached, or the sooner one if that is late.

    Source: arXiv 2602.06502; A-zhudong/DualMap@65f237b dualmap/scheduler/utils/double_hash_global_scheduler_utils.py
    and lazy_prefix_table.py: a prefix with 6.12 % of the last 200 requests is hashed with one block more. A first
    token is late after half of the SLO of 5 s. Left out: moving queued requests between the two when both are late,
    shrinking prefixes, and the order of its queue; hits come from events in place of its model of each cache.
    """

    def __init__(self) -> None:
        self._hot: set[int] = set()  # prefixes, by their last block
        self._window: deque[int] = deque(maxlen=200)

    def __call__(self, asked: Asked, replicas: Sequence[Seen]) -> int:
        prefix = next((block for block in asked.blocks if block not in self._hot), asked.blocks[-1])
        self._window.append(prefix)
        if len(self._window) > 20 and self._window.count(prefix) >= 0.0612 * len(self._window):
            self._hot.add(prefix)
        first, second = (_hashed(f"{at}:{prefix}", range(len(replicas))) for at in (1, 2))
        both = [replicas[first], replicas[(first + 1) % len(replicas) if second == first else second]]
        asked.chance.shuffle(both)
        best = min(both, key=lambda one: (-one.cached, len(one.live)))
        first_s = {one.number: (one.pending_tokens + asked.tokens - one.cached) / one.rate for one in both}
        if first_s[best.number] > 5.0 / 2:
            best = min(both, key=lambda one: (first_s[one.number], len(one.live)))
        return best.number


def dynamo(asked: Asked, replicas: Sequence[Seen]) -> int:
    """The lowest sum of blocks to prefill and of blocks in use, this request's included; ties at random.

    Source: ai-dynamo/dynamo@07a6c9c lib/kv-router/src/scheduling/selector/default.rs with config.rs: overlap credit 1,
    prefill scale 1, temperature 0, blocks of answers not counted, no prediction of what was sent. Left out: its queue
    while each worker has more than 16 batches to prefill; tiers. Counted in tokens.
    """

    def cost(one: Seen) -> float:
        in_use = asked.block_tokens * len(one.live.keys() | asked.blocks)
        return one.pending_tokens + asked.tokens - one.cached + in_use

    return _lowest(replicas, asked.chance, cost).number


def llm_d(asked: Asked, replicas: Sequence[Seen]) -> int:
    """The highest sum of weighted scores: prefix 3, and 2 each for KV in use, queue, and the turn of cold requests.

    Source: llm-d/llm-d-router@ebab687 (0.10) pkg/epp/framework/plugins/scheduling/scorer/{prefix,kvcacheutilization,
    queuedepth,nohitlru}; llm-d/llm-d@076e65d guides/precise-prefix-cache-routing has the weights, and counts what was
    sent as cached. Metrics are up to 50 ms old. Left out: such entries end after 2 s there, and with events here.
    """
    most = max(one.waiting for one in replicas)
    spread = most - min(one.waiting for one in replicas)
    is_cold = not any(one.expected for one in replicas)
    longest_ago = sorted(replicas, key=lambda one: one.cold_turn)
    ranks = {one.number: rank / max(1, len(replicas) - 1) for rank, one in enumerate(longest_ago)}

    def cost(one: Seen) -> float:
        queue = (most - one.waiting) / spread if spread else 1.0
        turn = 1 - ranks[one.number] if is_cold else 0.5
        return -3 * one.expected / asked.tokens - 2 * (1 - one.kv_used) - 2 * queue - 2 * turn

    chosen = _lowest(replicas, asked.chance, cost)
    if is_cold:
        chosen.cold_turn = 1 + max(one.cold_turn for one in replicas)
    return chosen.number


def ray_serve(asked: Asked, replicas: Sequence[Seen]) -> int:
    """The shortest queue of those with the longest match in its tree, or with the smallest tree if that is under 10 %.

    Source: ray-project/ray@06c16f2 python/ray/llm/_internal/serve/routing_policies/prefix_aware/prefix_aware_router.py
    (PrefixCacheAffinityRouter). By default no queue counts as imbalanced, so it never takes the better of two at
    random, and evicts nothing from its tree. Left out: limits of ongoing requests. Blocks stand for characters.
    """
    scores = {one.number: one.match(asked.blocks)[0] for one in replicas}
    if max(scores.values()) / len(asked.blocks) < 0.1:
        scores = {one.number: -len(one.tree) for one in replicas}
    return min(replicas, key=lambda one: (-scores[one.number], one.in_flight, one.number)).number


RULES: dict[str, Callable[[], Choose]] = {  # each makes a rule for one run
    "lmetric": lambda: lmetric,
    "lmetric-queue": lambda: partial(lmetric, counts_queue=True),
    "dualmap": DualMap,
    "sglang": lambda: sglang,
    "vllm-router": lambda: vllm_router,
    "vllm-router-hash": lambda: vllm_router_hash,
    "dynamo": lambda: dynamo,
    "llm-d": lambda: llm_d,
    "ray-serve": lambda: ray_serve,
}
