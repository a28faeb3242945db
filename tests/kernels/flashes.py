"""FlashAttention's own interfaces, on a CPU: what others build, as far as it is called here."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kernels.gpu.flash import LIBRARY
from kernels.paged import LayerCache
from kernels.plain import PlainAttention
from kernels.tables import TableStep

# As in vLLM 0.33, and another of its versions: one argument more, in the middle, and none for context parallelism.
NEW = """fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out,
    Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k,
    int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k,
    Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale,
    Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap,
    bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin,
    Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"""
OTHER = NEW.replace("Tensor? v_descale,", "Tensor? v_descale, Tensor? o_scale,").replace(
    ", int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k", ""
)
PLAIN = {
    "is_causal": True,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "num_splits": 0,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}


@contextmanager
def operator(schema: str = NEW) -> Iterator[list[dict[str, Any]]]:
    """The library is loaded; what its operator is called with is noted."""
    calls: list[dict[str, Any]] = []
    name = schema.partition("(")[0]
    library = torch.library.Library(LIBRARY, "DEF")
    library.define(schema)
    names = [argument.name for argument in getattr(getattr(torch.ops, LIBRARY), name).default._schema.arguments]

    def call(*values: Any) -> list[Tensor]:
        given = {name: value for name, value in zip(names, values, strict=True) if value is not None}
        calls.append(given)
        return [_fwd(given)]

    library.impl(name, call, "CPU")
    try:
        yield calls
    finally:
        library._destroy()


def _fwd(given: dict[str, Any]) -> Tensor:
    tensors = {"q", "k", "v", "seqused_k", "page_table", "softmax_scale", "max_seqlen_k", "is_rotary_interleaved"}
    assert {name: PLAIN[name] for name in PLAIN if name in given} == {
        name: value for name, value in given.items() if name not in tensors | {"cu_seqlens_q", "max_seqlen_q"}
    }
    queries: Tensor = given["q"]
    assert given["softmax_scale"] == queries.shape[-1] ** -0.5
    starts = given.get("cu_seqlens_q")
    if starts is None:  # then queries are [sequences, rows, heads, head_dim]
        assert queries.shape[1] == 1
        starts = torch.arange(len(queries) + 1, dtype=torch.int32)
    else:
        assert given["max_seqlen_q"] >= starts.diff().max()
    tables = (given["page_table"], given["seqused_k"], starts, given["max_seqlen_k"])
    rows = queries.flatten(0, -3)
    return _attended(rows, given["k"], given["v"], *tables).view_as(queries)


def _attended(
    rows: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, starts: Tensor, longest: int
) -> Tensor:
    assert tables.dtype == lengths.dtype == starts.dtype == torch.int32
    assert len(tables) == len(lengths) == len(starts) - 1 and starts[0] == 0
    none = torch.empty(0)
    step = TableStep(none, none, tables, lengths, starts, 0, len(rows), int(starts.diff().max()), longest)
    return PlainAttention().attend(rows, LayerCache(keys, values), step)
