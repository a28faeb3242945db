"""Settings of a simulation: the fleet, its speed, and the router's information about it."""

from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from lab.replay import CONFIG
from lab.trace.requests import Trace, TraceRequest
from replica.cache.lower import DISK, HOST
from replica.cache.moves import PULLED
from replica.config import SimulatedConfig

DEFAULT_CAPACITY_TOKENS = 427_232  # 26,702 blocks of 16: an 8B model on 80 GB


class Settings(Struct, frozen=True, kw_only=True):
    replicas: int = 4
    prefill_replicas: int = 0  # those among them that compute prompts for the others; 0: each takes whole requests
    capacity_tokens: int = DEFAULT_CAPACITY_TOKENS  # the size of each replica's cache
    prefill_tokens_per_s: float = 8000.0
    host_tokens: int = 0  # the host memory behind each cache
    disk_tokens: int = 0  # behind that
    load_tokens_per_s: float = SimulatedConfig().host_tokens_per_s  # the speed from host memory
    disk_tokens_per_s: float = 20_000.0  # the speed from and to a disk
    pull_tokens_per_s: float = 0.0  # the speed from a neighbour's cache or host memory; 0: neighbours cannot be read
    servers: int = 1  # prefills at once in each replica
    decode_tokens_per_s: float = 40.0
    model: Literal["fifo", "engine"] = "fifo"
    events: bool = True  # False: replicas send nothing, and the router knows only its own requests
    optimistic: bool = True  # False: blocks of routed prompts count as cached only when events confirm them
    event_delay_s: float = 0.0
    event_loss: float = 0.0  # share of batches that arrive only with the next one
    rate_error: float = 0.0  # half of the replicas report a prefill rate higher by this share, the others lower
    as_served: bool = False  # requests go where the trace says they went; the policy places only the others
    closed_loop: bool = False  # a session's turn comes when the one before has ended and its gap is over
    ranked: bool = True  # replicas compute prompts in the order of the router's priorities
    routers: int = 1
    replica_limit: int = CONFIG.replica_limit  # requests of one router at a replica; 0: no limit
    queue_size: int = CONFIG.queue_size  # the queue of one router
    queue_timeout_s: float = CONFIG.queue_timeout_s

    def check(self, trace: Trace) -> None:
        """Raise ValueError if a request of the trace can never run."""
        if self.prefill_replicas >= self.replicas:
            raise ValueError(f"{self.prefill_replicas} of {self.replicas} replicas compute prompts, and none generates")
        size, blocks = trace.block_tokens, self.capacity_blocks(trace.block_tokens)
        longest = max((self._longest(request) for request in trace.requests), default=0)
        if longest > blocks * size:
            raise ValueError(
                f"a cache of {self.capacity_tokens:,} tokens has {blocks:,} blocks of {size}, and the longest request "
                f"needs {-(-longest // size):,}; give it {-(-longest // size) * size:,} tokens or more"
            )

    def up_to(self, tokens: int) -> "Settings":
        """Make no medium larger than this; less memory is allocated for the same result."""
        return replace(
            self,
            capacity_tokens=min(self.capacity_tokens, tokens),
            host_tokens=min(self.host_tokens, tokens),
            disk_tokens=min(self.disk_tokens, tokens),
        )

    def rates(self) -> dict[str, float]:
        """Tokens per second at which a replica brings blocks, by source; those that it does not have are absent."""
        has = {HOST: self.host_tokens, DISK: self.disk_tokens, PULLED: self.pull_tokens_per_s}
        rates = {HOST: self.load_tokens_per_s, DISK: self.disk_tokens_per_s, PULLED: self.pull_tokens_per_s}
        return {source: rate for source, rate in rates.items() if has[source]}

    def most_tokens(self, trace: Trace) -> int:
        """Tokens that all requests together could fill; a larger cache makes no difference."""
        return sum(-(-self._longest(one) // trace.block_tokens) for one in trace.requests) * trace.block_tokens

    def _longest(self, request: TraceRequest) -> int:
        return request.input_tokens + (request.output_tokens if self.model == "engine" else 0)

    def capacity_blocks(self, block_tokens: int) -> int:
        return self.capacity_tokens // block_tokens
