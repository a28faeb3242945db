"""A model on a GPU: its weights, as much KV as fits beside them, and a graph for each size of a step."""

import logging
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.backends import ChosenAttention, choose
from kernels.paged import KvShape, LayerCache
from kernels.pointwise import Pointwise
from kernels.spans import Copy
from replica.chain import Chain
from replica.config import EngineConfig
from replica.device.accelerator import Accelerator, Memory
from replica.device.graph_sizes import decode_sizes, mixed_sizes
from replica.device.memory import DeviceMemory
from replica.device.orders import Limits, Size
from replica.device.runner import DeviceRunner
from replica.device.steps import Draw, Steps
from replica.messages import Sampling
from replica.model.config import ModelConfig, read_config
from replica.model.progress import progress_of
from replica.model.transformer import Transformer
from replica.model.weights import Weights
from replica.native import load_adapters
from replica.request import Request
from replica.sizing import GIGABYTE, blocks_in, kv_memory

log = logging.getLogger(__name__)

GRAPH_BYTES = 2 << 20  # that the driver takes for a graph
WARM = 1024  # rows of a prompt up to which its kernels may be others if something is cached before it


class Needs(NamedTuple):
    """Memory in bytes of a step beside weights and KV, and of all graphs."""

    step: int
    graphs: int


def build(config: EngineConfig) -> DeviceRunner:
    """ValueError, OSError or MemoryError where that cannot be."""
    try:
        return _build(config, Accelerator())
    except torch.OutOfMemoryError as error:
        said, advice = str(error).partition(". ")[0], "lower --gpu-memory-utilization or --max-num-batched-tokens"
        raise MemoryError(f"{said}; {advice}") from error


def _build(config: EngineConfig, accelerator: Accelerator) -> DeviceRunner:
    folder, dtype = Path(config.model_path), getattr(torch, config.dtype)
    before = accelerator.memory()
    model_config = read_config(folder)
    group = model_config.num_heads // model_config.num_kv_heads
    shape = KvShape(dtype, config.block_size, model_config.head_dim, group)
    choice = choose(config.attention, "cuda", shape)
    pointwise, draw = kernels_for(choice, shape)
    with Weights(folder, dtype, device=accelerator.device) as weights:
        model = Transformer(model_config, weights, config.max_model_len, pointwise)
        weights.finish()
    load_adapters(model.adapters, config)
    limits = Limits(config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len)
    # Plain torch computes with as many tokens as there may be: in a graph it always would.
    sizes = sizes_of(limits, model_config) if config.graphs and choice.attention.name != "torch" else ()

    def runner_with(blocks: int) -> DeviceRunner:
        memory = new_caches(model, blocks + 1, config.block_size)
        caches = [LayerCache(keys, values) for keys, values in memory]
        steps = Steps(model, choice.attention, draw, caches, limits, accelerator)
        return DeviceRunner(steps, DeviceMemory(memory, accelerator))

    needs = measured(runner_with(1), sizes, accelerator)
    bytes_per_token = model.config.kv_bytes_per_token(config.dtype)
    blocks = config.num_blocks or blocks_that_fit(
        before, accelerator.memory(), config.gpu_memory_utilization, needs, config.block_size, bytes_per_token
    )
    runner = runner_with(blocks)
    rehearse_copy(runner)
    capture_all(runner, sizes)
    say(config, model, choice, needs, blocks * config.block_size * bytes_per_token, len(sizes))
    return runner


def kernels_for(choice: ChosenAttention, shape: KvShape) -> tuple[Pointwise, Draw]:
    """Ours, if Triton works here, whatever attention does; it was tried where attention is ours, too."""
    if choice.attention.name not in ("triton", "torch"):
        choice = choose_ours(shape)
    if choice.attention.name == "torch":
        from kernels.sampling import draw

        return Pointwise(), draw
    from kernels.gpu.pointwise import TritonPointwise
    from kernels.gpu.sampling import draw as fused_draw

    return TritonPointwise(), fused_draw


def choose_ours(shape: KvShape) -> ChosenAttention:
    try:
        return choose("triton", "cuda", shape)
    except ValueError as error:
        log.warning("norms, rotations and draws are torch's, which is slower: %s", error)
        return choose("torch", "cuda", shape)


def sizes_of(limits: Limits, config: ModelConfig) -> tuple[Size, ...]:
    """The sizes of all graphs, the largest first: the others find room in the memory that it took."""
    sizes = [Size(True, rows) for rows in mixed_sizes(limits.rows, config.parameters // config.num_layers)]
    sizes += [Size(False, requests) for requests in decode_sizes(limits.requests)]
    return tuple(sorted(sizes, key=lambda size: size.rows, reverse=True))


def new_caches(model: Transformer, num_blocks: int, block_size: int) -> Tensor:
    """Allocate the caches of all layers, [layers, 2, num_blocks, ...].

    In memory a block's KV is in one piece, all layers together: so it is copied to and from the host at once.
    """
    config = model.config
    shape = (num_blocks, config.num_layers, 2, block_size, config.num_kv_heads, config.head_dim)
    return torch.zeros(shape, dtype=model.dtype, device=model.device).movedim(0, 2)


def measured(runner: DeviceRunner, sizes: tuple[Size, ...], accelerator: Accelerator) -> Needs:
    """By the largest steps there can be, and the two largest graphs, over a single block of KV."""
    rehearse(runner)  # compiles
    step = accelerator.peak_bytes(lambda: rehearse(runner)) + runner.own_bytes
    taken = []
    for size in sizes[:2]:
        before = accelerator.memory().own
        runner.capture(size)
        taken.append(accelerator.memory().own - before)
    return Needs(step, graphs_bytes(taken, len(sizes)))


def rehearse(runner: DeviceRunner) -> None:
    """Run the largest possible steps, and small ones, cold and warm, since each shape compiles other code."""
    rows, requests, longest = runner.limits
    prompt = min(rows, longest - 1)
    batches = [
        [made_up(prompt, runner) for _ in range(min(requests, max(1, rows // prompt)))],
        [made_up(1, runner) for _ in range(requests)],
        *([made_up(tokens, runner)] for tokens in doubled(prompt)),
        *([made_up(longest - 1, runner, computed=longest - 1 - tokens)] for tokens in doubled(min(prompt, WARM))),
        # A step's kernels also depend on what is before it, whether one token follows or more.
        *([made_up(tokens, runner, computed=tokens - own)] for tokens in doubled(longest) for own in (1, 2)),
    ]
    for batch in batches:
        runner.start([request.launch(request.remaining) for request in batch])()
        for request in batch:
            request.blocks = []  # which gives its seat back


def rehearse_copy(runner: DeviceRunner) -> None:
    """Run in the final memory, whose size is part of the compiled code."""
    runner.model.pointwise.copy(runner.steps.caches, [Copy(runner.num_blocks, runner.num_blocks, 1)])


def doubled(most: int) -> list[int]:
    """2, 4, 8, ..., and `most`."""
    return [*(1 << power for power in range(1, (most - 1).bit_length())), most]


def made_up(tokens: int, runner: DeviceRunner, computed: int = 0) -> Request:
    """A made-up request with all KV in the first block; its results are not used."""
    chain = Chain(array("I", bytes(4 * tokens)), runner.block_size, "")
    request = Request(id(chain), chain, tokens, Sampling(max_tokens=1, top_p=0.5), (0.0, 0))
    request.blocks = [0] * -(-tokens // runner.block_size)
    request.computed = request.launched = computed
    return request


def capture_all(runner: DeviceRunner, sizes: tuple[Size, ...]) -> None:
    if not sizes:
        return
    progress = progress_of("capturing graphs", len(sizes), spoken=str)
    for size in sizes:
        runner.capture(size)
        progress.advance(1)
    progress.finish()


def say(
    config: EngineConfig, model: Transformer, choice: ChosenAttention, needs: Needs, kv_bytes: int, graphs: int
) -> None:
    for name, reason in choice.passed.items():
        log.warning("attention %s cannot be used: %s", name, reason)
    log.info(
        "%s: %s, %.1f M parameters, %s, on %s, attention %s, the rest %s, %.2f GB of KV, %.2f GB for a step, %d graphs",
        Path(config.model_path).name,
        model.config.architecture,
        model.config.parameters / 1e6,
        config.dtype,
        torch.cuda.get_device_name(model.device),
        choice.attention.name,
        model.pointwise.name,
        kv_bytes / GIGABYTE,
        needs.step / GIGABYTE,
        graphs,
    )


# ---- shares of the memory


def blocks_that_fit(
    before: Memory, loaded: Memory, utilization: float, needs: Needs, block_size: int, bytes_per_token: int
) -> int:
    """Compute how many blocks fit, from memory `before` loading and after; other processes' memory is unavailable."""
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


def graphs_bytes(taken: Sequence[int], count: int) -> int:
    """By what the largest and the next took, in this order: they share what they compute in, and the rest take less."""
    return sum(taken) + (taken[-1] * (count - len(taken)) if taken else 0) + count * GRAPH_BYTES


def _gb(size: float) -> str:
    return f"{size / GIGABYTE:.1f} GB"
