"""Messages between the HTTP process and the engine's process: msgpack over one pair of ZeroMQ sockets.

New fields go last, with defaults; nothing is renamed.
"""

from collections.abc import Callable
from typing import TypeAlias

import msgspec
from msgspec import Struct, field

from api.openai.constraints import Constraint
from api.retention import Retain
from events.blocks import ExtraKey
from events.native import Load
from events.publisher import EventEndpoints


class Sampling(Struct, frozen=True, omit_defaults=True):
    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()  # the output ends with the first of these
    top_logprobs: int | None = None  # how many alternatives to report for each token; None: no logprobs at all
    ignore_eos: bool = False
    prompt_logprobs: int | None = None  # the same as `top_logprobs`, for each prompt token but the first
    constraint: Constraint | None = None  # the form of the answer
    script: bytes = b""  # simulated: the answer's tokens, packed as little-endian uint32; empty: they are made up


# ---- to the engine


class KVSource(Struct, frozen=True):
    """A neighbour that should have the KV of the first tokens of a prompt."""

    endpoint: str
    tokens: int


class Submit(Struct, omit_defaults=True):
    id: int
    prompt: bytes  # token ids, packed as little-endian uint32
    sampling: Sampling
    output: bytes = b""  # tokens that another replica has generated already, packed likewise
    lora_name: str | None = None
    cache_salt: str | None = None
    extras: dict[int, list[ExtraKey]] = {}
    priority: float = 0.0  # seconds: it counts as having come this much later than it did
    sources: list[KVSource] = []  # neighbours to ask for the beginning of the prompt
    retain: list[Retain] = []  # beginnings of the prompt to give up last
    is_cold: bool = False  # what it computes will not be asked for again


class Learn(Struct, tag="learn"):
    """The vocabulary for which constraints are compiled; sent once, before the first of them."""

    vocabulary: bytes  # packed by `replica.grammar.vocabulary`


class SubmitAll(Struct, tag="submit"):
    """The choices of one client's request, accepted together or not at all. They share their constraint."""

    submits: list[Submit]


class Cancel(Struct, tag="cancel"):
    ids: list[int]


class Reset(Struct, tag="reset"):
    """Forget the whole cache; answered by ResetDone."""

    id: int


class Stop(Struct, tag="stop"):
    """End now. Whoever drains waits for its requests first."""


# ---- from the engine


class TokenLogprobs(Struct, array_like=True):
    logprob: float
    top: list[tuple[int, float]]  # (token id, log probability), most likely first
    rank: int = 0  # the rank of the token itself, 1 for the most likely; 0: not known


class Output(Struct, array_like=True):
    """The result of one step for one request. A stop token is the last of `token_ids` when the reason is "stop"."""

    id: int
    token_ids: list[int]
    finish_reason: str | None = None  # "stop" or "length"
    cached_tokens: int = 0  # prompt tokens whose prefill was skipped; the same in every output of a request
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # the first output has them, from the second prompt token on


class Outputs(Struct, tag="outputs"):
    outputs: list[Output]


class Refused(Struct, tag="refused"):
    """All that came with this submit was not accepted: `full` (try again later), `too_long` or `invalid` (never)."""

    id: int
    reason: str
    message: str
    retry_after_s: float = 0.0


class ResetDone(Struct, tag="reset_done"):
    id: int
    done: bool


class PoolSnapshot(Struct):
    """The block pool's counters since the start, and its current state."""

    query_tokens: int = 0
    hit_tokens: int = 0
    query_blocks: int = 0
    hit_blocks: int = 0
    preempted_query_tokens: int = 0
    preempted_hit_tokens: int = 0
    evictions: int = 0
    collisions_refused: int = 0
    total: int = 0
    free: int = 0  # blocks without a reference, cached or not
    cached: int = 0  # named, with or without a reference
    unreferenced: int = 0  # cached and free: reusable until evicted
    referenced: int = 0  # live
    partial_hit_tokens: int = 0  # copied out of blocks that share only their beginning; not part of the hits above
    retained: int = 0  # given up last, in use or not
    retention_refused: int = 0  # blocks that were to be retained when there was no room for more

    @property
    def utilization(self) -> float:
        return self.referenced / self.total if self.total else 0.0

    @property
    def hit_rate(self) -> float:
        """Fraction of the full blocks looked up."""
        return self.hit_blocks / self.query_blocks if self.query_blocks else 0.0


class TierSnapshot(Struct, frozen=True):
    """A lower medium's counters since the start, and its current state."""

    total: int = 0
    cached: int = 0
    evictions: int = 0
    loaded_tokens: int = 0
    load_tokens_per_s: float = 0.0  # lately; 0: not known


class DiskCounters(Struct):
    """Records of the disk tier's file since the start."""

    written: int = 0
    refused_writes: int = 0  # their extra keys are too long
    failed_writes: int = 0  # and failed erasures
    read: int = 0
    failed_reads: int = 0
    wrong_reads: int = 0  # torn, damaged, or another record than expected


class Rates(Struct, frozen=True):
    """The same over the last seconds."""

    window_s: float = 0.0
    token_hit_rate: float = 0.0
    evictions_per_s: float = 0.0
    utilization: float = 0.0
    unreferenced_fraction: float = 0.0
    prompt_tokens_per_s: float = 0.0
    generated_tokens_per_s: float = 0.0
    token_s: float = 0.0  # the time between two tokens of an answer; 0: none was generated


class NeighbourSnapshot(Struct, frozen=True):
    """The counts of one side of reading blocks between replicas, since the start."""

    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    failures: dict[str, int] = {}  # failures by reason


class Stats(Struct, tag="stats"):
    """Sent a few times a second."""

    load: Load
    pool: PoolSnapshot
    rates: Rates = Rates()
    preemptions: int = 0
    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    decode_tokens_per_s: float = 0.0
    kv_events: int = 0
    constraint_failures: int = 0  # answers that ended where their constraint could not be followed further
    tiers: dict[str, TierSnapshot] = {}  # tiers by medium
    neighbours: dict[str, NeighbourSnapshot] = {}  # `read`, by neighbours, and `pulled` from them
    disk: DiskCounters = field(default_factory=DiskCounters)
    host_skipped_saves: int = 0  # evicted blocks that host memory had no free slot for
    disk_skipped_writes: int = 0  # blocks that the disk was too slow for
    cpu_wait_s: float = 0.0  # time in which the loop could run and had no processor


class Hello(Struct, tag="hello"):
    """The engine is ready; sent once."""

    model: str
    num_blocks: int
    block_size: int
    max_model_len: int
    endpoints: EventEndpoints | None = None  # None: events are off
    incarnation: int = 0
    topic: str = ""
    attention: str = ""  # how it is computed; empty where nothing is
    kv_read: str = ""  # the endpoint at which neighbours read its blocks; empty: they may not
    kv_layout: str = ""  # its blocks are of use to replicas with the same one


ToEngine: TypeAlias = Learn | SubmitAll | Cancel | Reset | Stop


class Loading(Struct, tag="loading"):
    """The engine's process is connected, and begins to load; sent once, before Hello."""


FromEngine: TypeAlias = Outputs | Refused | ResetDone | Stats | Hello | Loading

encode: Callable[[ToEngine | FromEngine], bytes] = msgspec.msgpack.Encoder().encode
decode_to_engine: Callable[[bytes], ToEngine] = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine: Callable[[bytes], FromEngine] = msgspec.msgpack.Decoder(FromEngine).decode
