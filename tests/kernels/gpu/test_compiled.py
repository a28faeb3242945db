"""Every kernel compiles for the GPUs that it is meant for, as it is launched there; no GPU is needed to see that."""

import pkgutil
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="there is no Triton here: see `make triton-check`")

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

import kernels.gpu
from kernels.adapters import ROOM, Table, Tiles, blank
from kernels.gpu.attention import Gpu, TritonAttention
from kernels.gpu.pointwise import TritonPointwise
from kernels.gpu.sampling import draw
from kernels.paged import LayerCache
from kernels.pointwise import Heads
from kernels.spans import Copy
from kernels.tables import TableStep
from tests.kernels.gpu.device import needs_compiler
from tests.kernels.gpu.launches import Launch, compiled, noted
from tests.kernels.tables import as_mixed

pytestmark = needs_compiler

# By compute capability: an A100, an L40S, an H200, a B200 and an RTX 5090.
GPUS = {
    80: Gpu(108, 163 * 1024),
    89: Gpu(142, 99 * 1024),
    90: Gpu(132, 227 * 1024),
    100: Gpu(148, 227 * 1024),
    120: Gpu(170, 99 * 1024),
}
H200 = GPUS[90]
REGISTERS = 65536  # that programs on a processor may have together
MODELS = ((16, 8, 128), (32, 8, 128), (14, 2, 64), (32, 8, 64))  # heads, KV heads, head_dim
LARGE = (8, 4, 256)
BLOCK_SIZE = 16
NO_CHANGES = blank(1, 2, torch.device("cpu"))[0]
TILES = Tiles(torch.zeros(64, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32))
BATCHES = ((1, 8), (7, 40), (256, 4096))  # sequences that decode, and tokens of a prompt
BOTH = ((True, False),) * len(BATCHES)  # ways to say which rows decode: in a graph, and outside of one
# Whatever the model's sizes, a way adds the same to a kernel: one model has both, the others one for each batch.
EITHER = ((True,), (False,), (True,))


@cache
def launches() -> list[Launch]:
    """Launches of served models, in small and large batches."""
    with noted() as all_launches:
        for dtype, models in ((torch.bfloat16, MODELS), (torch.float32, MODELS[:1])):
            for model in models:
                _attend(H200, dtype, *model, BOTH if model == MODELS[0] else EITHER)
                _fuse(dtype, *model)
            _attend(H200, dtype, *LARGE, EITHER)
        for vocab in (32000, 151936, 50257):
            _draw(vocab)
    return different(all_launches)


def different(all_launches: list[Launch]) -> list[Launch]:
    """One for each that is compiled otherwise."""
    return list({str(launch): launch for launch in all_launches}.values())


def _attend(
    gpu: Gpu, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, ways: tuple[tuple[bool, ...], ...]
) -> None:
    for (sequences, prefill), mixed_or_not in zip(BATCHES, ways, strict=True):
        attention, rows = TritonAttention(gpu), sequences + prefill
        memory = torch.zeros(3, BLOCK_SIZE, kv_heads, head_dim, dtype=dtype)
        queries = torch.zeros(rows, heads + 2 * kv_heads, head_dim, dtype=dtype)[:, :heads]
        for mixed in mixed_or_not:
            attention.attend(queries, LayerCache(memory, memory), table_step(sequences, prefill, mixed=mixed))


def table_step(decoding: int, prefill: int, device: str = "cpu", mixed: bool = False) -> TableStep:
    """One prompt, and this many decoding sequences."""
    numbers = torch.zeros(decoding + 2, dtype=torch.int32, device=device)
    step = TableStep(
        positions=numbers.long(),
        slots=numbers.long(),
        tables=torch.zeros(decoding + 1, 256, dtype=torch.int32, device=device),
        lengths=numbers[1:],
        starts=numbers,
        decoding=decoding,
        prefilling=prefill,
        longest_prefill=prefill,
        longest=256 * BLOCK_SIZE,
    )
    return as_mixed(step, 0, 0) if mixed else step


def _fuse(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    def zeros(*size: int) -> Tensor:
        return torch.zeros(*size, dtype=dtype)

    pointwise, width = TritonPointwise(), heads * head_dim
    caches = [LayerCache(*layer) for layer in zeros(2, 2, 3, BLOCK_SIZE, kv_heads, head_dim)]
    step: Any = SimpleNamespace(slots=torch.zeros(4, dtype=torch.int64))
    for delta in (None, zeros(4, width)):
        pointwise.add_norm(zeros(4, width), delta, zeros(width), 1e-6)
    pointwise.swiglu(zeros(4, 6 * width))
    for norms in (None, (zeros(head_dim), zeros(head_dim))):
        qkv, turn = zeros(4, (heads + 2 * kv_heads) * head_dim), zeros(4, 2, 1, head_dim // 2)
        pointwise.turn_and_store(qkv, Heads(heads, kv_heads, head_dim, norms), turn, caches[0], step)
    pointwise.copy(caches, [Copy(0, 1, 3)])
    for table in (Table(NO_CHANGES, even) for even in (1, 16)):
        pointwise.adapt(zeros(64, width), zeros(64, (heads + 2 * kv_heads) * head_dim), table, TILES, ROOM)


def _draw(vocab: int) -> None:
    numbers = torch.zeros(4)
    draw(torch.zeros(4, vocab), numbers, numbers.int(), numbers, numbers, numbers.double(), numbers.long())


def jitted() -> dict[str, Any]:
    modules = [import_module(f"kernels.gpu.{module.name}") for module in pkgutil.iter_modules(kernels.gpu.__path__)]
    return {
        name: function
        for module in modules
        for name, function in vars(module).items()
        if isinstance(function, JITFunction)
    }


def names_in(function: Any) -> Iterator[str]:
    yield from function.fn.__code__.co_names


def launched_kernels() -> set[str]:
    """Names of all kernels; a function that another one calls is part of that."""
    functions = jitted()
    called = {name for function in functions.values() for name in names_in(function) if name in functions}
    return functions.keys() - called


def test_every_kernel_is_launched_here() -> None:
    """So whoever adds one has it compiled."""
    assert {launch.kernel.__name__ for launch in launches()} == launched_kernels()


@pytest.mark.parametrize("kernel", sorted(launched_kernels()))
def test_what_is_launched_compiles_and_fits(kernel: str) -> None:
    mine = [launch for launch in launches() if launch.kernel.__name__ == kernel]
    assert mine
    for launch in mine:
        check(launch, 90, most_spilled=16)


@pytest.mark.parametrize("capability", [80, *(pytest.param(one, marks=pytest.mark.grid) for one in (89, 100, 120))])
def test_every_kernel_compiles_and_fits_on_others(capability: int) -> None:
    """Some of attention's products there want a few registers more than there are."""
    with noted() as asked:
        for model in (MODELS[0], LARGE):
            _attend(GPUS[capability], torch.bfloat16, *model, EITHER)
        _fuse(torch.bfloat16, *MODELS[0])
        _draw(151936)
    assert {launch.kernel.__name__ for launch in asked} == launched_kernels()
    for launch in different(asked):
        check(launch, capability, most_spilled=192)


def check(launch: Launch, capability: int, most_spilled: int) -> None:
    kernel = compiled(launch, capability)
    assert kernel.cubin, launch
    assert kernel.shared <= GPUS[capability].shared, f"{launch}: {kernel.shared} bytes of shared memory"
    assert kernel.stack <= most_spilled, f"{launch}: {kernel.stack} bytes of registers do not fit"


def test_changes_by_adapters_are_read_and_written_by_sixteen_bytes() -> None:
    """The compiler has to be told what the host knows of addresses from a table."""
    inputs, product = (torch.zeros(64, width, dtype=torch.bfloat16) for width in (2048, 4096))
    with noted() as asked:
        TritonPointwise().adapt(inputs, product, Table(NO_CHANGES, even=16), TILES, ROOM)
    lowering, raising = (compiled(launch).ptx for launch in asked)
    assert "cp.async.cg.shared.global" in lowering and "global.b16" not in lowering
    assert "st.global.v4" in raising and "global.b16" not in raising


def test_a_decode_leaves_room_for_a_second_program() -> None:
    """While one waits for memory, another may ask for its own."""
    decodes = [launch for launch in launches() if launch.kernel.__name__ == "decode_share"]
    assert decodes
    for launch in decodes:
        kernel = compiled(launch)
        assert 2 * kernel.shared <= H200.shared
        assert 2 * kernel.registers * 32 * launch.options["num_warps"] <= REGISTERS


@pytest.mark.parametrize("mixed", [True, False])
def test_attention_asks_the_device_for_no_length(mixed: bool) -> None:
    """On the device `meta` there is no number to be asked for."""
    queries = torch.zeros(20, 16, 128, dtype=torch.bfloat16, device="meta")
    memory = torch.zeros(3, BLOCK_SIZE, 8, 128, dtype=torch.bfloat16, device="meta")
    with noted() as asked:
        TritonAttention(H200).attend(queries, LayerCache(memory, memory), table_step(4, 16, "meta", mixed))
    names = [launch.kernel.__name__ for launch in asked]
    assert names == ["plan_shares", "decode_share", "combine_shares", "prefill_tile", "combine_splits"]


@pytest.mark.parametrize(("sequences", "added"), [(1, 63), (2, 99), (66, 99), (128, 99), (256, 99)])
def test_as_many_programs_are_added_as_fill_the_device(sequences: int, added: int) -> None:
    """Fewer where the longest sequences cannot be cut into so many."""
    queries = torch.zeros(sequences, 16, 128, dtype=torch.bfloat16)
    memory = torch.zeros(3, BLOCK_SIZE, 8, 128, dtype=torch.bfloat16)
    with noted() as asked:
        TritonAttention(H200).attend(queries, LayerCache(memory, memory), table_step(sequences, 0))
    assert asked[1].grid == (8, sequences + added)
    assert [launch.kernel.__name__ for launch in asked] == ["plan_shares", "decode_share", "combine_shares"]
