"""A replica's description of itself, parsed from its answers. Pure."""

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from router.members.ranks import Rank
from router.members.spec import (
    BadSpec,
    Engine,
    ModelName,
    NativeDescription,
    ReplicaSpec,
    readable_at,
    with_description,
)

MOST_MODELS = 4096  # of one replica, adapters included
MOST_REQUESTS = 10**6  # in one replica
MOST_BLOCKS = 2**31  # in one replica's pool

# No label reaches past its line: a text of nothing but open braces would take hours.
_METRIC = re.compile(
    rb"^(?:vllm:num_requests|sglang:num)_(running|waiting|running_reqs|queue_reqs)(?:\{([^}\n]*)\})?"
    rb" ([0-9.eE+-]{1,32})",
    re.M,
)
# What an engine's steps alone change: requests may come and wait while it computes nothing.
STEPS = (
    b"vllm:kv_cache_usage_perc",
    b"vllm:num_preemptions_total",
    b"vllm:prefix_cache_queries_total",
    b"vllm:prompt_tokens_total",
    b"vllm:generation_tokens_total",
    b"vllm:iteration_tokens_total_sum",
    b"sglang:num_used_tokens",
    b"sglang:token_usage",
    b"sglang:prompt_tokens_total",
    b"sglang:generation_tokens_total",
)
MOST_STEPS = 4096  # lines, of all ranks
LONGEST_LINE = 1024
MOST_SEARCHED_BYTES = 2**20  # the lines of all ranks stand together
SLEEP_STATE = b"vllm:engine_sleep_state"
_AWAKE = re.compile(rb'^vllm:engine_sleep_state\{[^}\n]*sleep_state="awake"[^}\n]*\} ([0-9.]{1,32})$', re.M)
_RANK = re.compile(rb'(?:^|,)(?:engine|dp_rank)="([0-9]{1,5})"')
_CACHE_CONFIG = re.compile(rb"^(?:vllm|sglang):cache_config_info\{([^}\n]{0,4096})\}", re.M)
_PAGES = re.compile(rb"^sglang:(num_pages|page_size)(?:\{([^}\n]{0,4096})\})? ([0-9.eE+]{1,32})$", re.M)
_CACHE_FIGURE = re.compile(rb'(?:^|,)(block_size|num_gpu_blocks|page_size|num_pages)="([0-9]{1,10})"')


class Facts(Struct, frozen=True):
    """A replica, as it described itself."""

    spec: ReplicaSpec  # completed
    native: bool
    models: tuple[str, ...]  # names that clients may ask for, its base model first
    adapters: frozenset[str] = frozenset()  # those of `models` that are LoRA adapters
    changes_adapters: bool = False  # it may load and unload them without a word
    tokenizer: str | None = None  # "bytes": a token is a byte
    total_blocks: int | None = None
    draining: bool = False
    loading: bool = False  # its sockets are not known yet, so do not take it for a replica without events
    ranks: tuple[Rank, ...] = ()  # its caches, at least one
    kv_read: str = ""  # the endpoint at which neighbours may read its blocks; empty: none
    kv_layout: str = ""  # only replicas of one layout can use each other's blocks


class Pool(Struct, frozen=True):
    """A cache on a GPU, as its engine describes it."""

    blocks: int
    block_tokens: int


class _Pool(Struct, frozen=True):
    total: Annotated[int, Meta(ge=0, le=MOST_BLOCKS)] = 0


class _Native(NativeDescription, frozen=True):
    tokenizer: str | None = None
    pool: _Pool = _Pool()
    adapters: Annotated[list[ModelName], Meta(max_length=MOST_MODELS)] | None = None  # None: it computes with none


class _Model(Struct, frozen=True):
    id: ModelName
    owned_by: str | None = None
    parent: str | None = None
    root: str | None = None
    max_model_len: Annotated[int, Meta(ge=1, lt=2**31)] | None = None


class _Models(Struct, frozen=True):
    data: Annotated[list[_Model], Meta(max_length=MOST_MODELS)]


_decode_native = msgspec.json.Decoder(_Native).decode
_decode_models = msgspec.json.Decoder(_Models).decode


def native_facts(spec: ReplicaSpec, body: bytes) -> Facts | None:
    """Parse the answer to GET /load; None if it is not a native replica's."""
    try:
        answer = _decode_native(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    completed = with_description(spec, answer)
    kv_read, kv_layout = readable_at(completed, answer)
    adapters = frozenset(answer.adapters or ()) - {answer.model}
    return Facts(
        spec=completed,
        native=True,
        models=(answer.model, *sorted(adapters)),
        adapters=adapters,
        changes_adapters=answer.adapters is not None,
        tokenizer=answer.tokenizer,
        total_blocks=answer.pool.total or None,
        draining=answer.draining,
        loading=answer.incarnation is None,
        ranks=(Rank(completed),),
        kv_read=kv_read,
        kv_layout=kv_layout,
    )


def foreign_facts(spec: ReplicaSpec, body: bytes) -> Facts:
    """Parse the answer to GET /v1/models; raise BadSpec if it names no model, or not that of the spec."""
    try:
        models = _decode_models(body).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadSpec(f"{spec.name}: /v1/models does not answer as OpenAI's does ({error})") from error
    adapters = {model.id for model in models if model.parent is not None} | set(spec.adapters)
    bases = [model for model in models if model.id not in adapters]
    if not bases:
        raise BadSpec(f"{spec.name}: /v1/models names no model")
    if spec.model is not None and spec.model not in [model.id for model in bases]:
        raise BadSpec(f"{spec.name} serves {bases[0].id!r}, not {spec.model!r}; correct model, or leave it out")
    base = next((model for model in bases if model.id == spec.model), bases[0])
    others = [model.id for model in bases if model is not base]  # further names of the same model
    return Facts(
        spec=msgspec.structs.replace(
            spec,
            model=base.id,
            engine=_engine(spec.engine, base.owned_by),
            max_model_len=spec.max_model_len or base.max_model_len,
        ),
        native=False,
        models=(base.id, *others, *sorted(adapters)),
        adapters=frozenset(adapters),
        changes_adapters=True,
    )


def _engine(named: Engine, owner: str | None) -> Engine:
    if named != "auto":
        return named
    return owner if owner in ("vllm", "sglang") else "openai"  # type: ignore[return-value]


def scraped_queues(metrics: bytes) -> dict[int | None, tuple[int, int]]:
    """Running and waiting requests by rank from the /metrics of vLLM or SGLang, and for None those of all ranks."""
    counts: dict[int | None, list[float]] = {}
    try:
        for name, labels, value in _found(_METRIC, metrics, b"vllm:num_requests", b"sglang:num_"):
            for rank in {None, _rank_in(labels)}:
                counts.setdefault(rank, [0.0, 0.0])[not name.startswith(b"running")] += float(value)
    except ValueError:
        return {}
    return {
        rank: (int(running), int(waiting))
        for rank, (running, waiting) in counts.items()
        if 0 <= running <= MOST_REQUESTS and 0 <= waiting <= MOST_REQUESTS
    }


def scraped_steps(metrics: bytes) -> int:
    """A number that is another one after each step of the engine that did something."""
    lines: list[bytes] = []
    for name in STEPS:  # an expression would take ten times as long, in the event loop
        at = metrics.find(name)
        while at >= 0 and len(lines) < MOST_STEPS:
            lines.append(metrics[at : at + LONGEST_LINE].partition(b"\n")[0])
            at = metrics.find(name, at + 1)
    return hash(tuple(lines))


def is_asleep(metrics: bytes) -> bool:
    """Return whether a rank of vLLM has been put to sleep: it takes requests, and computes nothing."""
    return any(not float(awake) for awake in _found(_AWAKE, metrics, SLEEP_STATE))


def scraped_pools(metrics: bytes) -> dict[int | None, Pool]:
    """The caches by rank from the /metrics of vLLM or SGLang, and for None all of them together."""
    pools: dict[int | None, Pool] = {}
    for labels in _found(_CACHE_CONFIG, metrics, b"vllm:cache_config_info", b"sglang:cache_config_info"):
        figures = {name: int(value) for name, value in _CACHE_FIGURE.findall(labels)}
        blocks = figures.get(b"num_gpu_blocks", figures.get(b"num_pages", 0))
        block_tokens = figures.get(b"block_size", figures.get(b"page_size", 0))
        for rank in {None, _rank_in(labels)}:
            so_far = pools.get(rank, Pool(0, 0))
            pools[rank] = Pool(so_far.blocks + blocks, max(so_far.block_tokens, block_tokens))
    pools = pools or _paged(metrics)
    return {rank: pool for rank, pool in pools.items() if 0 < pool.blocks <= MOST_BLOCKS and pool.block_tokens}


def _paged(metrics: bytes) -> dict[int | None, Pool]:
    """The caches that SGLang describes by two gauges; all processes of a rank describe the same one."""
    figures: dict[int | None, dict[bytes, int]] = {}
    try:
        for name, labels, value in _found(_PAGES, metrics, b"sglang:num_pages", b"sglang:page_size"):
            figures.setdefault(_rank_in(labels), {})[name] = int(float(value))
    except (ValueError, OverflowError):
        return {}
    pools = {rank: Pool(found.get(b"num_pages", 0), found.get(b"page_size", 0)) for rank, found in figures.items()}
    if pools:
        together = Pool(sum(pool.blocks for pool in pools.values()), max(pool.block_tokens for pool in pools.values()))
        pools[None] = together
    return pools


def _found(expression: re.Pattern[bytes], metrics: bytes, *marks: bytes) -> list[Any]:
    """Search from the first of these marks on: the expression alone would take long, in the event loop."""
    starts = [at for mark in marks if (at := metrics.find(mark)) >= 0]
    return expression.findall(metrics, min(starts), min(starts) + MOST_SEARCHED_BYTES) if starts else []


def _rank_in(labels: bytes) -> int | None:
    found = _RANK.search(labels)
    return None if found is None else int(found[1])
