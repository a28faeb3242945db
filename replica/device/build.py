"""A model on a GPU: its weights, as much KV as fits beside them, and a graph for each size of a step."""

import logging
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from replica.cache.chain import Chain
from replica.config import EngineConfig
from replica.device.accelerator import Accelerator, Span
from replica.device.orders import Limits, Size, decode_sizes, mixed_sizes
from replica.device.parts import Parts, limits_of, load
from replica.device.runner import DeviceRunner
from replica.device.steps import Steps
from replica.lora.adapter import Adapters
from replica.lora.slots import ANY
from replica.messages import Sampling
from replica.model.config import ModelConfig
from replica.model.progress import progress_of
from replica.model.ranks import ALONE, Ranks
from replica.model.sizing import GIGABYTE, blocks_in, kv_memory
from replica.runners.request import Request

log = logging.getLogger(__name__)

GRAPH_BYTES = 2 << 20  # the driver takes so much for a graph
WARM = 1024  # rows of a prompt up to which its kernels may be others if something is cached before it


class Needs(NamedTuple):
    """Memory in bytes of a step beside weights and KV, and of all graphs."""

    step: int
    graphs: int


class Team:
    """The processes that compute the model: here this one alone."""

    ranks: Ranks = ALONE

    def wait_loaded(self, adapters: Adapters) -> None:
        """Wait until the others have loaded their shares of the model and of the same adapters."""

    def runner(self, parts: Parts, config: EngineConfig, accelerator: Accelerator, blocks: int) -> DeviceRunner:
        return DeviceRunner(*parts.with_kv(blocks, config, accelerator, Steps))

    def spans(self) -> list[Span]:
        """Return what has happened to the memory of the others' devices."""
        return []


def build_with(config: EngineConfig, accelerator: Accelerator, team: Team) -> DeviceRunner:
    before = accelerator.memory()
    parts = load(config, accelerator, team.ranks)
    team.wait_loaded(parts.model.adapters)
    # Plain torch computes with as many tokens as there may be: in a graph it always would.
    has_graphs = config.graphs and parts.attention.name != "torch"
    limits = limits_of(config)
    if not parts.model.pointwise.adapts_in_graphs:
        limits = limits._replace(adapters=0)
    sizes = sizes_of(limits, parts.model.own) if has_graphs else ()

    needs = measured(team.runner(parts, config, accelerator, 1), sizes, accelerator)
    spans = [Span(before, accelerator.memory()), *team.spans()]
    bytes_per_token = parts.model.own.kv_bytes_per_token(config.dtype)
    blocks = config.num_blocks or min(
        blocks_that_fit(span, config.gpu_memory_utilization, needs, config.block_size, bytes_per_token)
        for span in spans
    )
    runner = team.runner(parts, config, accelerator, blocks)
    runner.steps.rehearse_copy()
    capture_all(runner, sizes)
    ranks = config.tensor_parallel_size
    log.info(
        "%s: %s, %.1f M parameters, %s, on %s%s, attention %s, the rest %s, %.2f GB of KV, %.2f GB for a step, "
        "%d graphs",
        Path(config.model_path).name,
        parts.model.config.architecture,
        parts.model.config.parameters / 1e6,
        config.dtype,
        f"{ranks} GPUs, each of which holds a share: " if ranks > 1 else "",
        accelerator.name,
        parts.attention.name,
        parts.model.pointwise.name,
        blocks * config.block_size * bytes_per_token / GIGABYTE,
        needs.step / GIGABYTE,
        len(sizes),
    )
    return runner


def sizes_of(limits: Limits, config: ModelConfig) -> tuple[Size, ...]:
    """The sizes of all graphs, the largest first: the others find room in the memory that it took."""
    sizes = [Size(True, rows) for rows in mixed_sizes(limits.rows, config.parameters // config.num_layers)]
    sizes += [Size(False, requests) for requests in decode_sizes(limits.requests)]
    if limits.adapters:
        sizes += [size._replace(adapted=True) for size in sizes]
    return tuple(sorted(sizes, key=lambda size: (size.rows, size.adapted), reverse=True))


def measured(runner: DeviceRunner, sizes: tuple[Size, ...], accelerator: Accelerator) -> Needs:
    """By the largest steps there can be, the largest graph and a smaller one, over a single block of KV."""
    rehearse(runner)  # compiles
    step = accelerator.peak_bytes(lambda: rehearse(runner)) + runner.own_bytes
    taken = []
    for size in (*sizes[:1], *[size for size in sizes if size.rows < sizes[0].rows][:1]):
        before = accelerator.memory().own
        runner.capture(size)
        taken.append(accelerator.memory().own - before)
    return Needs(step, graphs_bytes(taken, sizes))


def rehearse(runner: DeviceRunner) -> None:
    """Run the largest possible steps, and small ones, cold and warm, since each shape compiles other code."""
    rows, requests, longest, adapters = runner.limits
    prompt = min(rows, longest - 1)
    prompts = min(requests, max(1, rows // prompt))
    batches = [
        [made_up(prompt, runner) for _ in range(prompts)],
        [made_up(prompt, runner, adapter=ANY) for _ in range(prompts if adapters else 0)],
        [made_up(1, runner) for _ in range(requests)],
        *([made_up(tokens, runner)] for tokens in doubled(prompt)),
        *([made_up(longest - 1, runner, computed=longest - 1 - tokens)] for tokens in doubled(min(prompt, WARM))),
        # A step's kernels also depend on what is before it, whether one token follows or more.
        *([made_up(tokens, runner, computed=tokens - own)] for tokens in doubled(longest) for own in (1, 2)),
    ]
    for batch in batches:
        runner.start([request.launch(request.remaining) for request in batch])()
        for request in batch:
            request.blocks = []  # this gives its seat back


def doubled(most: int) -> list[int]:
    """2, 4, 8, ..., and `most`."""
    return [*(1 << power for power in range(1, (most - 1).bit_length())), most]


def made_up(tokens: int, runner: DeviceRunner, computed: int = 0, adapter: str | None = None) -> Request:
    """A made-up request with all KV in the first block; its results are not used."""
    chain = Chain(array("I", bytes(4 * tokens)), runner.block_size, "", lora_name=adapter)
    request = Request(id(chain), chain, tokens, Sampling(max_tokens=1, top_p=0.5), (0.0, 0))
    request.blocks = [0] * -(-tokens // runner.block_size)
    request.computed = request.launched = computed
    return request


def capture_all(runner: DeviceRunner, sizes: tuple[Size, ...]) -> None:
    if not sizes:
        return
    with progress_of("capturing graphs", len(sizes), spoken=str) as progress:
        for size in sizes:
            runner.capture(size)
            progress.advance(1)


# ---- shares of the memory


def blocks_that_fit(span: Span, utilization: float, needs: Needs, block_size: int, bytes_per_token: int) -> int:
    """Compute how many blocks fit; other processes' memory is unavailable."""
    before, loaded = span
    weights = loaded.own - before.own
    workspace = needs.step + needs.graphs
    left = min(kv_memory(before.total, utilization, weights, workspace), loaded.free - workspace)
    blocks = blocks_in(left, block_size, bytes_per_token) - 1  # one is for the rows that fill up a graph's batch
    if blocks < 1:
        raise MemoryError(
            f"no KV fits: {utilization:g} of the GPU's {_gb(before.total)} may be used (--gpu-memory-utilization), "
            f"and others hold {_gb(before.total - before.free)}; weights take {_gb(weights)}, a step "
            f"{_gb(needs.step)}, graphs {_gb(needs.graphs)}; raise it, lower --max-num-batched-tokens or "
            "--max-num-seqs, or take a larger GPU"
        )
    return blocks


def graphs_bytes(taken: Sequence[int], sizes: Sequence[Size]) -> int:
    """By what the largest and a smaller one took: they share what they compute in, and the rest take less."""
    shared = sum(taken) + (taken[-1] * (len(sizes) - len(taken)) if taken else 0)
    return shared + sum(GRAPH_BYTES * (1 + size.adapted) for size in sizes)  # adapters take more launches


def _gb(size: float) -> str:
    return f"{size / GIGABYTE:.1f} GB"
