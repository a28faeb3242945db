"""Settings of a simulation: the fleet, its speed, and the router's information about it."""

from msgspec import Struct

from lab.trace.requests import Trace
from router.config import RouterConfig

CONFIG = RouterConfig()
DEFAULT_CAPACITY_TOKENS = 427_232  # 26,702 blocks of 16: an 8B model on 80 GB


class Settings(Struct, frozen=True, kw_only=True):
    replicas: int = 4
    capacity_tokens: int = DEFAULT_CAPACITY_TOKENS  # the size of each replica's cache
    prefill_tokens_per_s: float = 8000.0
    servers: int = 1  # prefills at once in each replica
    decode_tokens_per_s: float = 40.0
    events: bool = True  # False: replicas send nothing, and the router knows only its own requests
    optimistic: bool = True  # False: blocks of routed prompts count as cached only when events confirm them
    as_served: bool = False  # requests go where the trace says they went; the policy places only the others
    closed_loop: bool = False  # a session's turn comes when the one before has ended and its gap is over
    working_set: bool = True  # sessions of a closed loop wait to begin while the caches do not hold them
    ranked: bool = True  # replicas compute prompts in the order of the router's priorities
    forgetful: bool = False  # replicas keep nothing of what the router calls cold, as ours do
    replica_limit: int = CONFIG.replica_limit  # requests at a replica; 0: no limit
    queue_size: int = CONFIG.queue_size
    queue_timeout_s: float = CONFIG.queue_timeout_s

    def check(self, trace: Trace) -> None:
        """Raise ValueError if a request of the trace can never run."""
        size, blocks = trace.block_tokens, self.capacity_blocks(trace.block_tokens)
        longest = max((request.input_tokens for request in trace.requests), default=0)
        if longest > blocks * size:
            raise ValueError(
                f"a cache of {self.capacity_tokens:,} tokens has {blocks:,} blocks of {size}, and the longest request "
                f"needs {-(-longest // size):,}; give it {-(-longest // size) * size:,} tokens or more"
            )

    def capacity_blocks(self, block_tokens: int) -> int:
        return self.capacity_tokens // block_tokens
