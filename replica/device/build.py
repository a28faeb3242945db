"""A model on a GPU: its weights, as much KV as fits beside them, and a graph for each size of a step."""

import logging
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.backends import ChosenAttention, choose
from kernels.paged import Attention, KvShape, LayerCache
from kernels.pointwise import Pointwise
from replica.cache.chain import Chain
from replica.config import EngineConfig
from replica.device.accelerator import Accelerator, Memory, Uploads
from replica.device.memory import DeviceMemory
from replica.device.runner import DeviceRunner, Draw
from replica.device.sizes import Limits, Size, decode_sizes, mixed_sizes
from replica.lora.slots import ANY
from replica.messages import Sampling
from replica.model.config import ModelConfig, read_config
from replica.model.progress import Progress
from replica.model.sizing import GIGABYTE, blocks_in, kv_memory
from replica.model.weights import Weights
from replica.runners.request import Request
from replica.transformer import Transformer

log = logging.getLogger(__name__)

GRAPH_BYTES = 2 << 20  # the driver takes this much for a graph
WARM = 1024  # rows of a prompt up to which its kernels may be others if something is cached before it


class Needs(NamedTuple):
    """Memory in bytes of a step beside weights and KV, and of all graphs."""

    step: int
    graphs: int


class Loaded(NamedTuple):
    """A model on the device, and kernels that work there."""

    model: Transformer
    attention: Attention[Any]
    draw: Draw
    weights_digest: str

    def runner(self, blocks: int, config: EngineConfig, accelerator: Accelerator) -> DeviceRunner:
        """Take memory for so many blocks, and one more for padding."""
        kv = new_caches(self.model, blocks + 1, config.block_size)
        memory = DeviceMemory(kv, accelerator)
        return DeviceRunner(
            self.model, self.attention, self.draw, layers_of(kv), limits_of(config), accelerator, memory
        )


def build_with(config: EngineConfig, accelerator: Accelerator) -> DeviceRunner:
    before = accelerator.memory()
    loaded = load(config, accelerator)
    model = loaded.model
    # Plain torch computes with as many tokens as there may be: in a graph it always would.
    has_graphs = config.graphs and loaded.attention.name != "torch"
    limits = limits_of(config)
    if not model.pointwise.adapts_in_graphs:
        limits = limits._replace(adapters=0)
    sizes = sizes_of(limits, model.config) if has_graphs else ()

    needs = measured(loaded.runner(1, config, accelerator), sizes, accelerator)
    after, bytes_per_token = accelerator.memory(), model.config.kv_bytes_per_token(config.dtype)
    blocks = config.num_blocks or blocks_that_fit(
        before, after, config.gpu_memory_utilization, needs, config.block_size, bytes_per_token
    )
    runner = loaded.runner(blocks, config, accelerator)
    runner.weights_digest = loaded.weights_digest
    runner.rehearse_copy()
    capture_all(runner, sizes)
    log.info(
        "%s: %s, %.1f M parameters, %s, on %s, attention %s, the rest %s, %.2f GB of KV, %.2f GB for a step, %d graphs",
        Path(config.model_path).name,
        model.config.architecture,
        model.config.parameters / 1e6,
        config.dtype,
        accelerator.name,
        loaded.attention.name,
        model.pointwise.name,
        blocks * config.block_size * bytes_per_token / GIGABYTE,
        needs.step / GIGABYTE,
        len(sizes),
    )
    return runner


def load(config: EngineConfig, accelerator: Accelerator) -> Loaded:
    """Choose the kernels, and load the model and the adapters that are named at the start."""
    folder, dtype = Path(config.model_path), getattr(torch, config.dtype)
    model_config = read_config(folder)
    groups = model_config.num_heads // model_config.num_kv_heads
    shape = KvShape(dtype, config.block_size, model_config.head_dim, groups)
    choice = choose(config.attention, "cuda", shape)
    for name, reason in choice.passed.items():
        log.warning("attention %s cannot be used: %s", name, reason)
    pointwise, draw = kernels_for(choice, shape)
    with Weights(folder, dtype, Uploads(accelerator).send, digests=config.keeps_kv) as weights:
        model = Transformer(model_config, weights, config.max_model_len, pointwise)
        weights.finish()
    model.adapters.load_named(config)
    return Loaded(model, choice.attention, draw, weights.digest)


def limits_of(config: EngineConfig) -> Limits:
    return Limits(
        config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len, adapters=len(config.lora_modules)
    )


def kernels_for(choice: ChosenAttention, shape: KvShape) -> tuple[Pointwise, Draw]:
    """Ours, if Triton works here, whatever attention does; it was tried where attention is ours, too."""
    if choice.attention.name not in ("triton", "torch"):
        try:
            choice = choose("triton", "cuda", shape)
        except ValueError as error:
            log.warning("norms, rotations and draws are torch's, which is slower: %s", error)
            choice = choose("torch", "cuda", shape)
    if choice.attention.name == "torch":
        from kernels.sampling import draw

        return Pointwise(), draw
    from kernels.gpu.pointwise import TritonPointwise
    from kernels.gpu.sampling import draw as fused_draw

    return TritonPointwise(), fused_draw


def new_caches(model: Transformer, num_blocks: int, block_size: int) -> Tensor:
    """Allocate the caches of all layers, [layers, 2, num_blocks, ...].

    In memory a block's KV is in one piece, all layers together: so it is copied to and from the host at once.
    """
    config = model.config
    shape = (num_blocks, config.num_layers, 2, block_size, config.num_kv_heads, config.head_dim)
    return torch.zeros(shape, dtype=model.dtype, device=model.device).movedim(0, 2)


def layers_of(caches: Tensor) -> list[LayerCache]:
    return [LayerCache(keys, values) for keys, values in caches]


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
    with Progress("capturing graphs", len(sizes), spoken=str) as progress:
        for size in sizes:
            runner.capture(size)
            progress.advance(1)


# ---- shares of the memory


def blocks_that_fit(
    before: Memory, loaded: Memory, utilization: float, needs: Needs, block_size: int, bytes_per_token: int
) -> int:
    """Compute how many blocks fit; other processes' memory is unavailable."""
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
