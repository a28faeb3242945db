"""A GGUF's tensors by the names that transformers gives them, each dequantized when it is read."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from replica.model.gguf.header import read_header

PARTS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
# llama.cpp rotates neighbours where transformers rotates halves, so its converter has put the rows of Llama's queries
# and keys in another order.
PERMUTED = {"attn_q": "head_count", "attn_k": "head_count_kv"}
TYPES = {type.value: type for type in GGML_QUANT_SIZES}
PIECE_VALUES = 2**18  # dequantized at a time


class GgufTensors:
    """The part of `safetensors.safe_open` that we use, for a GGUF file. ValueError, on one line, for a damaged one."""

    def __init__(self, file: Path) -> None:
        header = read_header(file)
        data = np.memmap(file, np.uint8, "r").view(np.ndarray)  # slices of a memmap are dear
        self._slices: dict[str, GgufSlice] = {}
        for name, tensor in header.tensors.items():
            match = NAME.fullmatch(name)
            part = match[2] if match else ""
            heads, own_name = None, name
            if match and part in PARTS:
                layer = "" if match[1] is None else f"model.layers.{match[1]}."
                own_name = f"{layer}{PARTS[part]}.{match[3]}"
            if part in PERMUTED and header.scalar("general.architecture") == "llama":
                queries, own = (header.scalar(f"llama.attention.{key}") for key in ("head_count", PERMUTED[part]))
                found = queries if own is None else own
                heads = found if isinstance(found, int) else 0
            if tensor.type not in TYPES:
                raise header.refused(
                    f"{name!r:.80} has the type {tensor.type}, which is not known; use another quantization"
                )
            type, rows = TYPES[tensor.type], math.prod(tensor.shape[:-1])
            block, size = GGML_QUANT_SIZES[type]
            row_bytes, odd = divmod(tensor.shape[-1] * size, block)
            stop = tensor.start + rows * row_bytes
            if odd or not row_bytes or stop > len(data):
                raise header.refused(
                    f"{name!r:.80} of shape {tensor.shape} in {type.name} is not all there; get the file again"
                )
            if heads is not None and (heads < 1 or tensor.shape[0] % (2 * heads)):
                raise header.refused(
                    f"{name!r:.80} has {tensor.shape[0]} rows, which {heads} heads cannot have; get it again"
                )
            packed = data[tensor.start : stop].reshape(rows, row_bytes)
            self._slices[own_name] = GgufSlice(packed, tensor.shape, type, heads)
        self.loaded_bytes = sum(4 * math.prod(tensor.shape) for tensor in header.tensors.values())

    def keys(self) -> Iterable[str]:
        return self._slices.keys()

    def get_slice(self, name: str) -> "GgufSlice":
        return self._slices[name]

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._slices[name].values()


@dataclass(frozen=True)
class GgufSlice:
    rows: NDArray[np.uint8]  # the bytes of each
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    heads: int | None  # their rows are put back in order

    def get_dtype(self) -> str:
        return "F32"

    def get_shape(self) -> tuple[int, ...]:
        return self.shape

    def values(self) -> torch.Tensor:
        values = np.empty((len(self.rows), self.shape[-1]), np.float32)
        step = max(1, PIECE_VALUES // self.shape[-1])
        for start in range(0, len(self.rows), step):
            piece = self.rows[start : start + step]
            try:  # it is one row: gguf takes sixteen at a time of many
                values[start : start + step] = dequantize(piece.reshape(1, -1), self.type).reshape(len(piece), -1)
            except NotImplementedError as error:
                raise ValueError(f"{self.type.name} cannot be dequantized; use another quantization") from error
        tensor = torch.from_numpy(values)
        if self.heads is not None:
            pairs = tensor.reshape(self.heads, self.shape[0] // self.heads // 2, 2, -1)
            tensor = pairs.transpose(1, 2)
        return tensor.reshape(self.shape)
