"""The metrics of a replica, under vLLM's names and our own; docs/metrics.md has the table, and a test compares the two.

A metric is a line in one of the tables below. The HTTP process measures what a client feels; what the engine counts
comes from its latest `Stats`. Nothing is global: a process can have several of these.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import TypeAlias

from api.http.prometheus import FIRST_TOKEN_S, Histogram, head, histogram, labels, metric
from engines.native import KNOWN_METRICS as KNOWN
from replica.messages import NeighbourSnapshot, Stats, TierSnapshot

# vLLM's own bounds, so that its dashboards' heat maps keep their rows.
BETWEEN_TOKENS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0,
    50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)

FINISH_REASONS = ("stop", "length", "abort", "error")
CONSTRAINT_LIMITS = ("waiting", "time", "size", "step")
DIRECTIONS = ("read", "pulled")  # neighbours read, or are read
REFUSALS = ("full", "too_long", "draining", "loading", "invalid")

# The metric, its meaning, and where `Stats` has it, or for histograms `Metrics`.
Row: TypeAlias = tuple[str, str, str]

GAUGES: tuple[Row, ...] = (
    (f"{KNOWN}:kv_cache_usage_perc", "Fraction of blocks held by live requests.", "pool.utilization"),
    (f"{KNOWN}:gpu_cache_usage_perc", "The same, under vLLM's old name.", "pool.utilization"),
    (f"{KNOWN}:gpu_prefix_cache_hit_rate", "Block hit rate since the start.", "pool.hit_rate"),
    (f"{KNOWN}:num_requests_running", "Choices in the running batch.", "load.running"),
    (f"{KNOWN}:num_requests_waiting", "Choices waiting for room.", "load.waiting"),
    ("warmroute:num_blocks", "Blocks in the pool.", "pool.total"),
    ("warmroute:free_blocks", "Blocks that no request holds, cached or not.", "pool.free"),
    ("warmroute:cached_blocks", "Blocks that a prompt could hit, held or not.", "pool.cached"),
    ("warmroute:unreferenced_blocks", "Cached blocks that no request holds.", "pool.unreferenced"),
    ("warmroute:referenced_blocks", "Blocks held by live requests.", "pool.referenced"),
    ("warmroute:retained_blocks", "Cached blocks that are given up last.", "pool.retained"),
    (
        "warmroute:unreferenced_fraction",
        "Unreferenced blocks as a fraction of the pool.",
        "rates.unreferenced_fraction",
    ),
    ("warmroute:token_hit_rate", "Token hit rate over the last seconds.", "rates.token_hit_rate"),
    ("warmroute:evictions_per_second", "Evictions over the last seconds.", "rates.evictions_per_s"),
    (
        "warmroute:queued_prefill_tokens",
        "Prompt tokens still to be computed, of waiting and running requests.",
        "load.queued_prefill_tokens",
    ),
    (
        "warmroute:prefill_tokens_per_second",
        "Speed of prefill while the engine does it, as measured.",
        "load.prefill_tokens_per_s",
    ),
    ("warmroute:decode_tokens_per_second", "Speed of decoding, as measured.", "decode_tokens_per_s"),
    (
        "warmroute:prompt_tokens_per_second",
        "Prompt tokens that came in per second over the last seconds.",
        "rates.prompt_tokens_per_s",
    ),
    (
        "warmroute:generated_tokens_per_second",
        "Tokens generated per second over the last seconds.",
        "rates.generated_tokens_per_s",
    ),
)

COUNTERS: tuple[Row, ...] = (
    (f"{KNOWN}:prefix_cache_queries", "Prompt tokens looked up in the cache.", "pool.query_tokens"),
    (f"{KNOWN}:prefix_cache_hits", "Prompt tokens found in the cache.", "pool.hit_tokens"),
    (f"{KNOWN}:gpu_prefix_cache_queries", "The same, under vLLM's old name.", "pool.query_tokens"),
    (f"{KNOWN}:gpu_prefix_cache_hits", "The same, under vLLM's old name.", "pool.hit_tokens"),
    (f"{KNOWN}:prompt_tokens", "Prompt tokens of choices begun.", "prompt_tokens"),
    (f"{KNOWN}:num_preemptions", "Choices that lost their blocks and started over.", "preemptions"),
    ("warmroute:prefix_cache_query_blocks", "Full blocks looked up.", "pool.query_blocks"),
    ("warmroute:prefix_cache_hit_blocks", "Full blocks found.", "pool.hit_blocks"),
    (
        "warmroute:partial_hit_tokens",
        "Prompt tokens reused from blocks of which only the beginning was the same; not part of the hit rates.",
        "pool.partial_hit_tokens",
    ),
    (
        "warmroute:preempted_query_tokens",
        "Tokens looked up again after a preemption; not part of the hit rates.",
        "pool.preempted_query_tokens",
    ),
    (
        "warmroute:preempted_hit_tokens",
        "Tokens found again after a preemption; not part of the hit rates.",
        "pool.preempted_hit_tokens",
    ),
    ("warmroute:evictions", "Cached blocks whose slot was given away.", "pool.evictions"),
    (
        "warmroute:retention_refused_blocks",
        "Blocks that a client asked to keep when its share was in use.",
        "pool.retention_refused",
    ),
    (
        "warmroute:collisions_refused",
        "Hits refused because the block's tokens or parent were others.",
        "pool.collisions_refused",
    ),
    ("warmroute:computed_prompt_tokens", "Prompt tokens that went through prefill.", "computed_prompt_tokens"),
    ("warmroute:engine_steps", "Steps of the engine's loop.", "steps"),
    (
        "warmroute:cpu_wait_seconds",
        "Time in which the engine's loop could run and had no processor: other programs had them all.",
        "cpu_wait_s",
    ),
    ("warmroute:kv_events", "Cache events published.", "kv_events"),
    ("warmroute:host_skipped_saves", "Evicted blocks lost because host memory had no slot.", "host_skipped_saves"),
    ("warmroute:disk_written_blocks", "Blocks written to the disk.", "disk.written"),
    ("warmroute:disk_read_blocks", "Blocks read from the disk, and verified.", "disk.read"),
    ("warmroute:disk_skipped_writes", "Blocks not written because the disk was too slow.", "disk_skipped_writes"),
    ("warmroute:disk_refused_writes", "Blocks not written because of long extra keys.", "disk.refused_writes"),
    ("warmroute:disk_failed_writes", "Writes and erasures that the disk failed to do.", "disk.failed_writes"),
    ("warmroute:disk_failed_reads", "Reads that the disk failed to do.", "disk.failed_reads"),
    ("warmroute:disk_wrong_reads", "Blocks not used because they were torn or damaged.", "disk.wrong_reads"),
)

# The same for each medium below the cache.
TIER_GAUGES: tuple[Row, ...] = (
    ("warmroute:tier_blocks", "Blocks that a lower medium has room for.", "total"),
    ("warmroute:tier_cached_blocks", "Blocks in a lower medium that a prompt could hit.", "cached"),
    (
        "warmroute:tier_load_tokens_per_second",
        "Speed at which tokens came back from a lower medium; 0 if none did lately.",
        "load_tokens_per_s",
    ),
)

TIER_COUNTERS: tuple[Row, ...] = (
    ("warmroute:tier_evictions", "Cached blocks of a lower medium whose slot was given away.", "evictions"),
    ("warmroute:loaded_tokens", "Prompt tokens brought back from a lower medium.", "loaded_tokens"),
)

# The same for both sides of reading blocks between replicas.
NEIGHBOUR_COUNTERS: tuple[Row, ...] = (
    ("warmroute:neighbour_blocks", "Blocks that came from neighbours, or went to them.", "blocks"),
    ("warmroute:neighbour_bytes", "Bytes of these blocks.", "bytes"),
    ("warmroute:neighbour_seconds", "Time that pulls took, or streams to neighbours.", "seconds"),
)

HISTOGRAMS: tuple[Row, ...] = (
    (f"{KNOWN}:time_to_first_token_seconds", "Until the first token.", "first_token_s"),
    (f"{KNOWN}:inter_token_latency_seconds", "From a token to the next one.", "between_tokens_s"),
    (f"{KNOWN}:e2e_request_latency_seconds", "From arrival to the last token.", "request_s"),
    (f"{KNOWN}:request_decode_time_seconds", "From the first token to the last.", "decode_s"),
    (f"{KNOWN}:request_time_per_output_token_seconds", "Mean time per token of a choice.", "per_token_s"),
    (f"{KNOWN}:request_prompt_tokens", "Prompt tokens of a choice.", "prompt_tokens"),
    (f"{KNOWN}:request_generation_tokens", "Tokens generated for a choice.", "output_tokens"),
    (f"{KNOWN}:request_params_max_tokens", "max_tokens of a choice.", "max_tokens"),
    (f"{KNOWN}:request_params_n", "n of an HTTP request.", "choices"),
    (f"{KNOWN}:time_per_output_token_seconds", "The inter-token latency, under vLLM's old name.", "between_tokens_s"),
)


class Metrics:
    """The HTTP process's own counts, and a window on the engine's."""

    def __init__(self, model: str, block_size: int, stats: Callable[[], Stats]) -> None:
        self._model = model
        self._block_size = block_size
        self._stats = stats
        self.first_token_s = Histogram(FIRST_TOKEN_S)
        self.between_tokens_s, self.per_token_s = Histogram(BETWEEN_TOKENS_S), Histogram(BETWEEN_TOKENS_S)
        self.request_s, self.decode_s = Histogram(REQUEST_S), Histogram(REQUEST_S)
        self.prompt_tokens, self.output_tokens, self.max_tokens = (Histogram(TOKENS) for _ in range(3))
        self.choices = Histogram(CHOICES)
        self.tokens_generated = 0
        self.client_disconnects = 0
        self.open_requests = 0
        self.draining = False
        self.finished: Counter[str] = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self.refused: Counter[str] = Counter(dict.fromkeys(REFUSALS, 0))
        self.constraint_limits: Counter[str] = Counter(dict.fromkeys(CONSTRAINT_LIMITS, 0))

    def text(self) -> bytes:
        return "".join(self._parts()).encode()

    def choice_begun(self, prompt_tokens: int, max_tokens: int) -> None:
        """The engine has given its first output."""
        self.prompt_tokens.observe(prompt_tokens)
        self.max_tokens.observe(max_tokens)

    def choice_finished(self, reason: str, *, tokens: int, first_s: float, last_s: float, arrived_s: float) -> None:
        """One choice is complete; the three times are of one monotonic clock."""
        self.finished[reason] += 1
        self.output_tokens.observe(tokens)
        self.request_s.observe(last_s - arrived_s)
        self.decode_s.observe(last_s - first_s)
        if tokens > 1:
            self.per_token_s.observe((last_s - first_s) / (tokens - 1))

    def _parts(self) -> Iterator[str]:
        stats, one = self._stats(), labels(model_name=self._model)
        for kind, rows in (("gauge", GAUGES), ("counter", COUNTERS)):
            for name, meaning, path in rows:
                yield metric(kind, name, meaning, [(one, attrgetter(path)(stats))])
        for kind, name, meaning, value in (
            ("gauge", "warmroute:open_requests", "HTTP requests in progress.", self.open_requests),
            ("gauge", "warmroute:draining", "1 while no new work is taken.", self.draining),
            ("counter", f"{KNOWN}:generation_tokens", "Tokens generated.", self.tokens_generated),
            ("counter", "warmroute:client_disconnects", "Clients that left before the end.", self.client_disconnects),
        ):
            yield metric(kind, name, meaning, [(one, value)])
        cache = labels(block_size=str(self._block_size), model_name=self._model, num_gpu_blocks=str(stats.pool.total))
        yield metric("gauge", f"{KNOWN}:cache_config_info", "1; its labels say how large the cache is.", [(cache, 1)])
        tiers = stats.tiers or {"CPU": TierSnapshot()}
        for kind, rows in (("gauge", TIER_GAUGES), ("counter", TIER_COUNTERS)):
            for name, meaning, path in rows:
                by_medium = ((f"{labels(medium=medium)},{one}", getattr(tier, path)) for medium, tier in tiers.items())
                yield metric(kind, name, meaning, by_medium)
        sides = [
            (f"{labels(direction=direction)},{one}", stats.neighbours.get(direction, NeighbourSnapshot()))
            for direction in DIRECTIONS
        ]
        for name, meaning, path in NEIGHBOUR_COUNTERS:
            yield metric("counter", name, meaning, ((labelled, getattr(side, path)) for labelled, side in sides))
        failed = "Pulls, or connections of neighbours, that failed, by reason."
        failures = (
            (f"{labelled},{labels(reason=reason)}", count)
            for labelled, side in sides
            for reason, count in side.failures.items()
        )
        yield metric("counter", "warmroute:neighbour_failures", failed, failures)
        finished = ((f"{labels(finished_reason=reason)},{one}", count) for reason, count in self.finished.items())
        yield metric("counter", f"{KNOWN}:request_success", "Choices completed.", finished)
        refused = ((f"{one},{labels(reason=reason)}", count) for reason, count in self.refused.items())
        yield metric("counter", "warmroute:requests_refused", "Refused HTTP requests for an answer.", refused)
        limits = self.constraint_limits | Counter(step=stats.constraint_failures)
        reached = ((f"{labels(limit=limit)},{one}", limits[limit]) for limit in CONSTRAINT_LIMITS)
        yield metric("counter", "warmroute:constraint_limits", "Constrained requests that met a limit.", reached)
        for name, meaning, path in HISTOGRAMS:
            yield head(name, meaning, "histogram") + histogram(name, one, getattr(self, path))
