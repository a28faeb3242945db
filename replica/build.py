"""Builds the native engine's runner: on a CPU or on a GPU."""

import logging
from pathlib import Path

import msgspec
import torch

from kernels.backends import choose
from kernels.linear import can_pack
from kernels.paged import KvShape
from replica.config import EngineConfig
from replica.model.config import read_config
from replica.model.sizing import CPU_KV_CACHE_GB, GIGABYTE, blocks_in
from replica.runners.native import NativeRunner
from replica.runners.runner import Runner

log = logging.getLogger(__name__)


def build(config: EngineConfig) -> Runner:
    """Load the model and take the memory for its KV; ValueError, OSError or MemoryError where that cannot be."""
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise ValueError(f"--device cuda: torch {torch.__version__} sees no GPU here; use --device cpu, or fix it")
    if config.device == "cpu" or not has_gpu:
        return build_on_cpu(config)
    from replica.device import accelerator, build  # they ask for more to be installed

    try:
        return build.build_with(config, accelerator.Accelerator())
    except torch.OutOfMemoryError as error:
        said, advice = str(error).partition(". ")[0], "lower --gpu-memory-utilization or --max-num-batched-tokens"
        raise MemoryError(f"{said}; {advice}") from error


def build_on_cpu(config: EngineConfig) -> NativeRunner:
    folder, dtype = Path(config.model_path), getattr(torch, config.dtype)
    model_config = read_config(folder)
    choice = choose(config.attention, "cpu", KvShape(dtype, config.block_size, model_config.head_dim))
    for name, reason in choice.passed.items():
        log.warning("attention %s cannot be used: %s", name, reason)
    if not can_pack(dtype):
        log.warning("this torch does not pack %s weights: slower, and bits depend on the rest of a batch", config.dtype)
    bytes_per_token = model_config.kv_bytes_per_token(config.dtype)
    num_blocks = config.num_blocks or max(1, blocks_in(CPU_KV_CACHE_GB * GIGABYTE, config.block_size, bytes_per_token))
    # No request is longer than the cache, whatever a config.json claims: the model keeps a row for each position.
    longest = min(config.max_model_len, num_blocks * config.block_size)
    config = msgspec.structs.replace(config, num_blocks=num_blocks, max_model_len=longest)
    runner = NativeRunner(config, model_config, choice.attention)
    log.info(
        "%s: %s, %.1f M parameters, %s, attention %s, %d torch threads, %.2f GB of KV",
        folder.name,
        model_config.architecture,
        model_config.parameters / 1e6,
        config.dtype,
        choice.attention.name,
        torch.get_num_threads(),
        num_blocks * config.block_size * bytes_per_token / GIGABYTE,
    )
    return runner
