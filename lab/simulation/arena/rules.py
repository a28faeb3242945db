"""How others place a request: each function takes a request and the replicas, and returns the chosen one's number.

They are written from published rules, with their defaults, and read only what their source knows. What all leave out:
health, retries, locality, LoRA, several routers, and halves of a request (prefill apart from decode).
Continuum (arXiv 2511.02230) is not among them: it keeps KV in the engine over a tool call, and places nothing.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from random import Random
from typing import NamedTuple, TypeAlias

from msgspec import Struct, field

from router.placement.policy import Ring


class Asked(NamedTuple):
    tokens: int
    blocks: Sequence[int]  # as in a trace: equal blocks are equal with everything before them; the last may not be full
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
    # By events: the tokens of this request that are cached, and these with what was sent and not confirmed yet.
    cached: float = 0.0
    expected: float = 0.0
    # By scraping its metrics.
    waiting: int = 0
    kv_used: float = 0.0

    def in_tree(self, blocks: Sequence[int]) -> int:
        return bisect_left(blocks, True, key=lambda block: block not in self.tree)


Choose: TypeAlias = Callable[[Asked, Sequence[Seen]], int]


def lmetric(asked: Asked, replicas: Sequence[Seen], *, counts_queue: bool = False) -> int:
    """The lowest product of new tokens and requests in flight, this one included.

    Source: arXiv 2603.15202; sgl-project/sglang@acaa759 sgl-model-gateway/src/policies/lmetric.rs, and `lmetric-scorer`
    of llm-d-router, which counts what was sent as cached. `counts_queue`: read the paper as adding the tokens that
    wait for prefill. Left out: its detector of cases in which the product misleads.
    """
    new = [asked.tokens - one.expected + one.pending_tokens * counts_queue for one in replicas]
    costs = [(tokens * (one.in_flight + 1), one.in_flight, tokens) for tokens, one in zip(new, replicas, strict=True)]
    return replicas[costs.index(min(costs))].number


def sglang(asked: Asked, replicas: Sequence[Seen], *, last: Seen | None = None) -> int:
    """`cache_aware`: the longest match in the router's own tree if it is over 30 % and loads are balanced.

    Source: lightseekorg/smg@73da68c (sglang-router's home) model_gateway/src/policies/cache_aware.rs over HTTP, with
    the command's defaults: imbalanced is a difference over 64 requests and a ratio over 1.5. Left out: the tree's
    eviction, which begins at 2^26 characters for each worker. Blocks stand for characters.
    """
    least = min(replicas, key=lambda one: (one.in_flight, one.sent, one.number))
    most = max(one.in_flight for one in replicas)
    if most - least.in_flight > 64 and most > 1.5 * least.in_flight:
        return least.number
    if last is not None:
        return last.number
    matched, _, number = max(
        (matched, one.tree[asked.blocks[matched - 1]] if matched else 0, one.number)
        for one in replicas
        for matched in (one.in_tree(asked.blocks),)
    )
    return number if matched / len(asked.blocks) > 0.3 else least.number


def vllm_router(asked: Asked, replicas: Sequence[Seen]) -> int:
    """`cache_aware` as in sglang, but a known session goes where its last request went.

    Source: vllm-project/router@16917f4 src/policies/cache_aware.rs, src/main.rs (same defaults). Left out: sessions
    forgotten after an hour.
    """
    return sglang(asked, replicas, last=next((one for one in replicas if one.number == asked.last), None))


def vllm_router_hash(asked: Asked, replicas: Sequence[Seen]) -> int:
    """`consistent_hash` of the session, else of the whole request.

    Source: vllm-project/router@080589a src/policies/consistent_hash.rs, hash_key.rs. Left out: its own hash function
    and 160 points a worker; our ring has 128.
    """
    key = f"request:{asked.blocks[-1]}" if asked.session is None else asked.session
    return int(next(_ring(tuple(one.number for one in replicas)).walk(key)))


@cache
def _ring(numbers: tuple[int, ...]) -> Ring:
    return Ring(map(str, numbers))


class DualMap:
    """Two candidates by hashes of a prefix: the one with more cached, or the sooner one if that is late.

    Source: arXiv 2602.06502; A-zhudong/DualMap@65f237b dualmap/scheduler/utils/double_hash_global_scheduler_utils.py
    and lazy_prefix_table.py: a prefix with 6.12 % of the last 200 requests is hashed with one block more. A first
    token is late after half of the SLO of 5 s. Left out: moving queued requests between the two when both are late,
    shrinking prefixes, and the order of its queue; hits come from events in place of its model of each cache.
    """

    def __init__(self) -> None:
        self._hot: set[int] = set()  # prefixes, by their last block
        self._window: deque[int] = deque()
        self._counts: Counter[int] = Counter()

    def __call__(self, asked: Asked, replicas: Sequence[Seen]) -> int:
        prefix = next((block for block in asked.blocks if block not in self._hot), asked.blocks[-1])
        self._window.append(prefix)
        self._counts[prefix] += 1
        if len(self._window) > 200:
            self._counts[self._window.popleft()] -= 1
        if len(self._window) > 20 and self._counts[prefix] >= 0.0612 * len(self._window):
            self._hot.add(prefix)
        ring = _ring(tuple(range(len(replicas))))
        first, second = (int(next(ring.walk(f"{hashed}:{prefix}"))) for hashed in (1, 2))
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
    costs = [
        one.pending_tokens
        + asked.tokens
        - one.cached
        + asked.block_tokens * (len(one.live) + sum(block not in one.live for block in asked.blocks))
        for one in replicas
    ]
    return replicas[_lowest(costs, asked.chance)].number


class LlmD:
    """The highest sum of weighted scores: prefix 3, and 2 each for KV in use, queue, and the turn of cold requests.

    Source: llm-d/llm-d-router@ebab687 (0.10) pkg/epp/framework/plugins/scheduling/scorer/{prefix,kvcacheutilization,
    queuedepth,nohitlru}; llm-d/llm-d@076e65d guides/precise-prefix-cache-routing has the weights, and counts what was
    sent as cached. Metrics are up to 50 ms old. Left out: such entries end after 2 s there, and with events here.
    """

    def __init__(self) -> None:
        self._cold: dict[int, None] = {}  # replicas in the order of their last cold request, the oldest first

    def __call__(self, asked: Asked, replicas: Sequence[Seen]) -> int:
        waiting = [one.waiting for one in replicas]
        spread = max(waiting) - min(waiting)
        is_cold = not any(one.expected for one in replicas)
        turns = {number: turn for turn, number in enumerate(self._cold)}
        oldest = sorted(replicas, key=lambda one: turns.get(one.number, -1))
        ranks = {one.number: rank / max(1, len(replicas) - 1) for rank, one in enumerate(oldest)}
        costs = [
            -3 * one.expected / asked.tokens
            - 2 * (1 - one.kv_used)
            - 2 * ((max(waiting) - one.waiting) / spread if spread else 1.0)
            - 2 * (1 - ranks[one.number] if is_cold else 0.5)
            for one in replicas
        ]
        number = replicas[_lowest(costs, asked.chance)].number
        if is_cold:
            self._cold.pop(number, None)
            self._cold[number] = None
        return number


def ray_serve(asked: Asked, replicas: Sequence[Seen]) -> int:
    """The shortest queue of those with the longest match in its tree, or with the smallest tree if that is under 10 %.

    Source: ray-project/ray@06c16f2 python/ray/llm/_internal/serve/routing_policies/prefix_aware/prefix_aware_router.py
    (PrefixCacheAffinityRouter). By default no queue counts as imbalanced, so it never takes the better of two at
    random, and evicts nothing from its tree. Left out: limits of ongoing requests. Blocks stand for characters.
    """
    matched = [one.in_tree(asked.blocks) for one in replicas]
    if max(matched) / len(asked.blocks) < 0.1:
        matched = [-len(one.tree) for one in replicas]
    best = [one for one, blocks in zip(replicas, matched, strict=True) if blocks == max(matched)]
    return min(best, key=lambda one: (one.in_flight, one.number)).number


def _lowest(costs: Sequence[float], chance: Random) -> int:
    least = min(costs)
    return chance.choice([index for index, cost in enumerate(costs) if cost == least])


RULES: dict[str, Callable[[], Choose]] = {  # each makes a rule for one run
    "lmetric": lambda: lmetric,
    "lmetric-queue": lambda: partial(lmetric, counts_queue=True),
    "dualmap": DualMap,
    "sglang": lambda: sglang,
    "vllm-router": lambda: vllm_router,
    "vllm-router-hash": lambda: vllm_router_hash,
    "dynamo": lambda: dynamo,
    "llm-d": LlmD,
    "ray-serve": lambda: ray_serve,
}
