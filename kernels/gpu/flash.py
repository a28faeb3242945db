"""FlashAttention 3 with vLLM's extensions, which reads tables as they are here.

vLLM's operator is called itself: its Python wrapper imports all of vLLM.
"""

import inspect
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.paged import Attention, KvShape, LayerCache
from kernels.tables import TableStep

LIBRARY = "_vllm_fa3_C"
HOPPER = 9  # compute capability
TYPES = (torch.bfloat16, torch.float16)
HEAD_STEP, LARGEST_HEAD = 8, 256
# From this size on, version 3 may read blocks as whole tiles: what lies behind a sequence's end in its last block then
# counts, and one that is not a number spoils the result.
WHOLE_TILES = 64

# Versions differ in their arguments and the order of these, but not in their meaning. All others are optional.
COMMON = {"q", "k", "v", "cu_seqlens_q", "seqused_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "page_table"}
CONSTANTS: dict[str, Any] = {
    "is_causal": True,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "is_rotary_interleaved": True,
    "num_splits": 0,  # it takes as many as seem right to it
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}


class FlashAttention3(Attention[TableStep]):
    """The operator of vLLM's library, called once for all rows: a decoding row is a prefill of one row."""

    name = "flash3"

    def __init__(self, operator: Any) -> None:
        """Raise RuntimeError if this is no operator that can be called here."""
        self._operator = operator
        self._others = others_of(operator, COMMON)

    def attend(self, queries: Tensor, cache: LayerCache, step: TableStep) -> Tensor:
        # Without starts each sequence has one row: [sequences, 1, heads, head_dim].
        results: list[Tensor] = self._operator(
            q=queries if step.prefilling else queries.unsqueeze(1),
            k=cache.keys,
            v=cache.values,
            cu_seqlens_q=step.starts if step.prefilling else None,
            seqused_k=step.lengths,
            max_seqlen_q=max(1, step.longest_prefill) if step.prefilling else None,
            max_seqlen_k=step.longest,
            softmax_scale=queries.shape[-1] ** -0.5,
            page_table=step.tables,
            **self._others,
        )
        return results[0].flatten(0, -3)


def others_of(operator: Any, given: set[str]) -> dict[str, Any]:
    """Further arguments that this version requires."""
    schema = operator.default._schema
    names, what = {argument.name for argument in schema.arguments}, schema.name.replace("::", ".")
    if not names >= given:
        raise RuntimeError(f"{what} does not take {', '.join(sorted(given - names))}; use another version of it")
    others = {}
    for argument in schema.arguments:
        if argument.name in CONSTANTS:
            others[argument.name] = CONSTANTS[argument.name]
        elif argument.name not in given and not argument.has_default_value():
            if not str(argument.type).startswith("Optional"):
                raise RuntimeError(f"{what} wants {argument.name}, which is unknown; use another version of it")
            others[argument.name] = None
    return others


def own_flash3(shape: KvShape) -> FlashAttention3:
    """FlashAttention 3 from an installed `vllm_flash_attn`."""
    _check_flash3(shape)
    function = import_module("vllm_flash_attn").flash_attn_varlen_func
    if "seqused_k" not in inspect.signature(function).parameters:
        raise RuntimeError("this vllm_flash_attn takes no seqused_k; build one of 2025 or later")
    return FlashAttention3(_operator())


def flash3_of_vllm(shape: KvShape) -> FlashAttention3:
    """FlashAttention 3 from the library inside an installed vllm, without importing vllm."""
    _check_flash3(shape)
    found = find_spec("vllm")
    folders = found.submodule_search_locations if found else None
    if not folders:
        raise ImportError("vllm is not installed")
    libraries = [path for folder in folders for path in Path(folder, "vllm_flash_attn").glob(f"{LIBRARY}*.so")]
    if not libraries:
        raise ImportError(f"this vllm has no {LIBRARY}; install one for CUDA")
    torch.ops.load_library(libraries[0])
    return FlashAttention3(_operator())


def _operator() -> Any:
    namespace = getattr(torch.ops, LIBRARY)
    if not hasattr(namespace, "fwd"):
        raise RuntimeError(f"torch.ops.{LIBRARY} has no fwd; it was built without this version of FlashAttention")
    return namespace.fwd


def _check_flash3(shape: KvShape) -> None:
    if shape.dtype not in TYPES:
        raise RuntimeError(f"FlashAttention 3 computes {' and '.join(map(str, TYPES))}, not {shape.dtype}")
    if shape.head_dim % HEAD_STEP or shape.head_dim > LARGEST_HEAD:
        raise RuntimeError(
            f"FlashAttention 3 wants heads of a multiple of {HEAD_STEP}, up to {LARGEST_HEAD}, not of {shape.head_dim}"
        )
    if shape.block_size >= WHOLE_TILES:
        raise RuntimeError(f"FlashAttention 3 wants a block size below {WHOLE_TILES}, not {shape.block_size}")
    major, minor = torch.cuda.get_device_capability()
    if major != HOPPER:
        raise RuntimeError(f"FlashAttention 3 needs compute capability {HOPPER}.x; this device has {major}.{minor}")
