"""A replica compiles all its kernels at the start: whatever is asked later, no request waits for a compiler.

The build, the engine and Triton's launches are those of a GPU; only the driver, the graphs and the memory are not.
"""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("triton", reason="there is no Triton here: see `make triton-check`")

import torch
from safetensors.torch import save_file

from events.blocks import pack_tokens
from kernels.backends import ChosenAttention
from kernels.gpu.attention import TritonAttention
from replica.config import EngineConfig, LoraModule
from replica.device import build
from replica.device.accelerator import Memory
from replica.device.runner import DeviceRunner
from replica.engine.engine import Engine
from replica.messages import Sampling, Submit
from replica.model.config import parse_config
from replica.runners.clock import WallClock
from replica.transformer import Transformer
from tests.gpu.engines import RandomWeights
from tests.kernels.gpu.device import needs_compiler
from tests.kernels.gpu.driver import noted_compiles
from tests.kernels.gpu.test_compiled import H200
from tests.replica.device.hosts import HostAccelerator
from tests.replica.lora.random_adapter import write_adapter

pytestmark = needs_compiler

LONGEST = 2500
SMALL = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": 384,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": LONGEST,
}
RANKS = {"usual": 16, "wide": 300}  # of adapters: graphs have no room for the second
# Heads, KV heads, head_dim, tokens in the vocabulary, requests and tokens in a step, whether there are graphs.
SHAPES = {
    "Qwen3-0.6B's heads": (16, 8, 128, 384, 24, 2048, True),
    "Qwen2.5-0.5B's heads, odd numbers": (14, 2, 64, 331, 7, 777, True),
    "one KV head, no graphs": (8, 1, 64, 384, 16, 512, False),
}


class NoDevice(HostAccelerator):
    """It has as much memory as is wanted."""

    def memory(self) -> Memory:
        return Memory(1 << 40, 1 << 40, 0)

    def peak_bytes(self, run: Callable[[], object]) -> int:
        run()
        return 0


@pytest.mark.parametrize("shape", [*(pytest.param(one, marks=pytest.mark.grid) for one in [*SHAPES][:2]), [*SHAPES][2]])
def test_nothing_is_compiled_after_the_start(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heads, kv_heads, head_dim, vocabulary, requests, rows, graphs = SHAPES[shape]
    fields = SMALL | {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    folder = saved(fields | {"vocab_size": vocabulary}, tmp_path / "model")
    chosen = ChosenAttention(TritonAttention(H200), {})
    monkeypatch.setattr(build, "choose", lambda *_: chosen)
    shape_of = parse_config(fields | {"vocab_size": vocabulary}, "the shape")
    folders = {name: write_adapter(tmp_path / name, shape_of, rank, rank) for name, rank in RANKS.items()}
    config = EngineConfig(
        model="model",
        model_path=str(folder),
        dtype="bfloat16",
        num_blocks=1200,
        max_num_seqs=requests,
        max_num_batched_tokens=rows,
        max_model_len=LONGEST,
        lora_modules=tuple(LoraModule(name, str(one)) for name, one in folders.items()),
        graphs=graphs,
        events=None,
    )
    with noted_compiles() as compiles:
        runner = build.build_with(config, NoDevice())
        at_start = len(compiles)
        assert at_start > 10
        serve(Engine(config, runner, WallClock()), runner, Random(0))
        assert compiles[at_start:] == []


def saved(fields: dict[str, Any], folder: Path) -> Path:
    weights = RandomWeights(torch.device("cpu"), keeps=True)
    Transformer(parse_config(fields, "the shape"), weights, LONGEST)
    folder.mkdir()
    save_file(weights.kept, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def serve(engine: Engine, runner: DeviceRunner, chance: Random) -> None:
    """Short and long prompts, some that begin like others, with all that clients may ask for."""
    known: list[list[int]] = [[]]
    for number in range(300):
        prompt = known[chance.randrange(len(known))][: chance.randrange(LONGEST - 800)]
        prompt = prompt + [chance.randrange(runner.vocab_size) for _ in range(chance.choice((1, 2, 15, 40, 300, 780)))]
        known.append(prompt)
        sampling = Sampling(
            max_tokens=chance.randrange(1, 12),
            temperature=chance.choice((0.0, 1.0)),
            top_p=chance.choice((1.0, 0.5)),
            top_k=chance.choice((0, 5)),
            min_p=chance.choice((0.0, 0.1)),
            frequency_penalty=chance.choice((0.0, 0.0, 0.5)),
            logit_bias=chance.choice(({}, {}, {3: 1.0})),
            top_logprobs=chance.choice((None, None, 2)),
            prompt_logprobs=chance.choice((None, None, None, 1)),
            ignore_eos=True,
        )
        adapter = chance.choice((None, None, *RANKS))
        submit = Submit(number, pack_tokens(prompt), sampling, priority=float(number), lora_name=adapter)
        assert engine.submit(submit) is None
        for _ in range(chance.choice((0, 0, 0, 1, 5, 40))):
            engine.step()
    while engine.busy:
        engine.step()
