"""A model is brought up with what works on the GPU, and nothing at the start needs more memory than there is."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.backends import ChosenAttention
from kernels.paged import KvShape
from kernels.plain import PlainAttention
from kernels.pointwise import Pointwise
from kernels.sampling import draw
from replica.config import LoraModule
from replica.device import build
from replica.device.build import build_with, kernels_for, rehearse, sizes_of
from replica.device.sizes import Limits
from replica.engine.engine import Engine
from replica.model.config import parse_config, read_config
from replica.runners.clock import WallClock
from tests.replica.device.hosts import HostAccelerator, runner_of
from tests.replica.lora.random_adapter import write_adapter
from tests.replica.models import config_of, finish, native, saved, submit
from tests.replica.shapes import QWEN3_06B


def choice(name: str) -> ChosenAttention:
    attention: Any = SimpleNamespace(name=name)
    return ChosenAttention(attention, {})


@pytest.mark.parametrize(("tokens", "longest"), [(40, 512), (300, 99)])
def test_the_largest_steps_are_rehearsed_over_a_single_block(tokens: int, longest: int, tmp_path: Path) -> None:
    """However long a text may get: its KV need not fit anywhere yet."""
    config = config_of(
        saved("qwen3", tmp_path), num_blocks=1, max_num_batched_tokens=tokens, max_model_len=longest, graphs=False
    )
    runner = runner_of(config, HostAccelerator())
    rehearse(runner)
    rehearse(runner)  # all seats have been given back
    runner.rehearse_copy()


def test_graphs_are_captured_from_the_largest_on() -> None:
    """The other graphs fit into its memory; the first two determine the total."""
    sizes = sizes_of(Limits(rows=300, requests=40, tokens=512), parse_config(QWEN3_06B, "the shape"))
    assert [size.rows for size in sizes] == sorted((size.rows for size in sizes), reverse=True)
    assert {size.rows for size in sizes if not size.mixed} == {1, 2, 4, 8, 16, 24, 32, 40}
    assert {size.rows for size in sizes if size.mixed} == {16, 32, 64, 96, 128, 160, 192, 224, 256, 300}
    assert len(set(sizes)) == len(sizes)


def test_torchs_changes_by_adapters_are_in_no_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They ask the device which rows have one, as no capture may."""
    attention = PlainAttention()
    monkeypatch.setattr(attention, "name", "flash3")
    monkeypatch.setattr(build, "choose", lambda *_: ChosenAttention(attention, {}))
    monkeypatch.setattr(build, "kernels_for", lambda *_: (Pointwise(), draw))
    model = saved("qwen3", tmp_path)
    module = LoraModule("a", str(write_adapter(tmp_path / "a", read_config(model), 8, 1, 0.15)))
    config = config_of(model, num_blocks=20, max_num_batched_tokens=32, max_num_seqs=2, lora_modules=(module,))
    runner = build_with(config, HostAccelerator())
    assert runner.graphs and not any(size.adapted for size in runner.graphs)
    engine = Engine(config, runner, WallClock())
    submit(engine, 1, range(10), lora_name="a")
    submit(expected := native(model, lora_modules=(module,)), 1, range(10), lora_name="a")
    assert finish(engine)[1].token_ids == finish(expected)[1].token_ids


def test_without_triton_all_is_torchs() -> None:
    pointwise, drawing = kernels_for(choice("torch"), KvShape(torch.float32, 16, 64))
    assert type(pointwise) is Pointwise and drawing is draw


def test_where_only_flash_attention_works_the_rest_is_torchs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def choose(name: str, *_: object) -> ChosenAttention:
        if name == "triton":
            raise ValueError("there is no compiler")
        return ChosenAttention(PlainAttention(), {})

    monkeypatch.setattr(build, "choose", choose)
    with caplog.at_level(logging.WARNING):
        pointwise, drawing = kernels_for(choice("flash3"), KvShape(torch.bfloat16, 16, 64))
    assert type(pointwise) is Pointwise and drawing is draw
    assert "norms, rotations and draws are torch's, which is slower: there is no compiler" in caplog.text
