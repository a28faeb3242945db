"""Small engines in virtual time, chains for small pools, and a runner with a memory of its own."""

from collections.abc import Iterable, Sequence
from typing import Any

from events.blocks import pack_tokens
from replica.cache.block_pool import BlockPool
from replica.cache.chain import Chain
from replica.config import EngineConfig, SimulatedConfig
from replica.engine.engine import Engine
from replica.messages import Output, Refused, Sampling, Submit
from replica.runners.request import Request, Scheduled
from replica.runners.runner import SampledToken
from replica.runners.simulated import SimulatedRunner
from tests.replica.tiers.simulated import SimulatedMover, VirtualClock

MODEL = "model"
SIZE = 4


def chain(tokens: Iterable[int], **extra: Any) -> Chain:
    return Chain(tokens, SIZE, MODEL, **extra)


def forged(tokens: Iterable[int], victim: Chain, **extra: Any) -> Chain:
    """A chain with the victim's keys: a forged hash collision."""
    forgery = chain(tokens, **extra)
    forgery.keys[:] = victim.keys[: len(forgery.keys)]
    return forgery


def admit(pool: BlockPool, request: Chain, *, look_up: bool = True) -> list[int]:
    """Take blocks for all tokens of the chain, hits first; `look_up=False` is a request that was admitted earlier."""
    if look_up:
        match = pool.match(request)
        hits, request.named, request.identity = match.blocks, len(match.blocks), match.identity
    else:
        hits = []
    blocks = pool.take(hits, -(-len(request) // pool.block_size) - len(hits))
    assert blocks is not None
    return blocks


def serve(pool: BlockPool, request: Chain) -> list[int]:
    """Serve one prompt from look-up to release; return its blocks."""
    blocks = admit(pool, request)
    pool.store(request, blocks, len(request.keys))
    pool.keep_tail(request, blocks, len(request))
    pool.release(blocks)
    return blocks


def engine(*, runner: type[SimulatedRunner] | None = None, **changes: Any) -> Engine:
    """A small simulated engine in virtual time; any field of EngineConfig can be changed."""
    defaults = {"block_size": SIZE, "num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 32}
    config = EngineConfig(**{"model": MODEL, "engine": "simulated", **defaults, **changes})
    clock = VirtualClock()
    made = (runner or SimulatedRunner)(config.simulated, clock, config.vocabulary, config.eos_token_ids)
    mover = SimulatedMover(clock, 100_000.0, config.block_size)
    return Engine(config, made, clock, mover if config.host_blocks else None)


def advance(of: Engine) -> None:
    """Let virtual time pass until the next block has come, where nothing can be computed before."""
    if of.only_loads and isinstance(of.mover, SimulatedMover) and of.mover.next_s is not None:
        of.clock.sleep(max(0.0, of.mover.next_s - of.clock.now_s()))


def submit(
    to: Engine, number: int, prompt: Sequence[int], max_tokens: int = 4, *, output: Sequence[int] = (), **extra: Any
) -> Refused | None:
    """Send a request; fields that Submit does not have go to its Sampling."""
    own = {name: extra.pop(name) for name in list(extra) if name in Submit.__struct_fields__}
    own.setdefault("priority", 0.0)
    sampling = Sampling(max_tokens=max_tokens, **extra)
    return to.submit(Submit(number, pack_tokens(prompt), sampling, pack_tokens(output), **own))


def step(of: Engine) -> list[Output]:
    """Run one step, and check every invariant."""
    advance(of)
    outputs = of.step()
    of.check()
    return outputs


def drain(of: Engine, limit: int = 10_000) -> dict[int, list[int]]:
    """Step until no request is left; return the generated tokens by request."""
    texts: dict[int, list[int]] = {}
    for _ in range(limit):
        if not of.busy:
            return texts
        for output in step(of):
            texts.setdefault(output.id, []).extend(output.token_ids)
    raise AssertionError(f"{list(of.scheduler.requests)} did not finish in {limit} steps")


def generate(to: Engine, prompt: Sequence[int], max_tokens: int = 4, **extra: Any) -> tuple[list[int], int]:
    """Answer to a single request, and the number of its cached tokens."""
    assert submit(to, 0, prompt, max_tokens, **extra) is None
    tokens: list[int] = []
    cached = 0
    while to.busy:
        for output in step(to):
            tokens += output.token_ids
            cached = output.cached_tokens
    return tokens, cached


class RememberingRunner(SimulatedRunner):
    """A runner with a memory like a model's: the value of a token encodes all tokens before it and their identity.

    It fails when a request gets blocks without its own prefix, whatever the pool's records. All blocks are read before
    any is written, as in one pass over a model's layers: no request may use values computed in the same step. Copies
    come first, and erase the rest of their targets.
    """

    def __init__(
        self,
        speed: SimulatedConfig,
        clock: VirtualClock,
        vocabulary: tuple[int, int],
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        super().__init__(speed, clock, vocabulary, eos_token_ids)
        self.kv: dict[tuple[int, int], int] = {}
        self.copied_tokens = 0

    def run(self, batch: Sequence[Scheduled]) -> list[SampledToken | None]:
        self.copy(batch)
        for request, start, *_ in batch:
            expected = content(request.chain, self.tokens(request)[:start])
            assert self.held(request, start) == expected, f"request {request.id} reads KV of another request"
        written: set[tuple[int, int]] = set()
        for request, start, count, _ in batch:
            values = content(request.chain, self.tokens(request)[: start + count])[start:]
            places = [place(request, position) for position in range(start, start + count)]
            assert written.isdisjoint(places), f"request {request.id} writes to a slot of another request"
            written.update(places)
            self.kv.update(zip(places, values, strict=True))
        return super().run(batch)

    def copy(self, batch: Sequence[Scheduled]) -> None:
        """Copy in order; reading all sources first must give the same result."""
        targets: set[int] = set()
        for request, start, _, copy in batch:
            if copy is None:
                continue
            assert copy.source not in targets, f"request {request.id} copies a block that is copied in the same step"
            assert (copy.target, copy.tokens) == place(request, start), (
                f"request {request.id} copies too much or little"
            )
            targets.add(copy.target)
            values = [self.kv.get((copy.source, offset)) for offset in range(copy.tokens)]
            for offset in range(request.chain.block_size):
                self.kv.pop((copy.target, offset), None)
            self.kv |= {(copy.target, at): value for at, value in enumerate(values) if value is not None}
            self.copied_tokens += copy.tokens

    def tokens(self, request: Request) -> list[int]:
        """The request's tokens known to the runner."""
        return request.chain.tokens.tolist()

    def held(self, request: Request, count: int) -> list[int | None]:
        return [self.kv.get(place(request, position)) for position in range(count)]


def place(request: Request, position: int) -> tuple[int, int]:
    """Location of a token's KV: the block, and the offset in it."""
    block, offset = divmod(position, request.chain.block_size)
    return request.blocks[block], offset


def content(chain: Chain, tokens: Iterable[int]) -> list[int]:
    """A number for all that the KV of each of these tokens, the first of the chain, depends on."""
    value = hash((chain.lora_name, chain.cache_salt))
    return [value := hash((value, token)) for token in tokens]
