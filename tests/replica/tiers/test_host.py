"""Blocks that the pool gives up go to the host's memory, and come back while others compute."""

from replica.cache.lower import HOST
from replica.config import SimulatedConfig
from replica.engine.engine import Engine
from tests.replica.engines import engine, generate


def tiered(*, num_blocks: int = 8, host_blocks: int = 32, host_tokens_per_s: float = 1000.0) -> Engine:
    simulated = SimulatedConfig(host_tokens_per_s=host_tokens_per_s)
    return engine(num_blocks=num_blocks, host_blocks=host_blocks, simulated=simulated)


def test_a_prompt_that_was_evicted_is_loaded_instead_of_computed() -> None:
    own = tiered()
    first, cached = generate(own, range(20))
    assert cached == 0
    generate(own, range(100, 120))
    again, cached = generate(own, range(20))
    assert again == first
    assert cached == 16, "all full blocks but the one with the last token"
    assert own.scheduler.transfers.loaded_tokens == {HOST: 8}, "two blocks were still in the pool"
