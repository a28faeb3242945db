"""Small models with random weights, made by transformers, and native engines that serve them.

Each architecture is named where it is used: transformers loads it then, and it takes seconds.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from events.blocks import pack_tokens
from replica.build import build
from replica.config import EngineConfig
from replica.engine.engine import Engine
from replica.messages import Output, Sampling, Submit, TokenLogprobs
from replica.model.config import read_config
from replica.process import make_mover
from replica.runners.clock import WallClock
from replica.runners.runner import Runner
from tests.late import transformers

VOCABULARY = 320
LENGTH = 512
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# The architecture, and what its config has besides.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-odd": ("Llama", {"intermediate_size": 1001, "head_dim": 10}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 24}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
}


@cache
def reference(name: str) -> "transformers.PreTrainedModel":
    """The model as transformers runs it: every weight random, and its logits far enough apart to be told apart."""
    torch.manual_seed(sum(name.encode()))
    architecture, changes = MODELS[name]
    config = getattr(transformers, f"{architecture}Config")(**SMALL | changes)
    model: transformers.PreTrainedModel = getattr(transformers, f"{architecture}ForCausalLM")(config)
    model.eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.2 + (1.0 if weight.dim() == 1 else 0.0))
    return model


def saved(name: str, folder: Path) -> Path:
    """The model in a folder of its own."""
    made = folder / name
    if not made.is_dir():
        reference(name).save_pretrained(made)
    return made


def config_of(folder: Path, **changes: Any) -> EngineConfig:
    """Without events; any field can be changed."""
    return EngineConfig(
        **{
            "model": folder.name,
            "model_path": str(folder),
            "vocabulary": (0, read_config(folder).vocab_size),
            "block_size": 16,
            "num_blocks": 128,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 512,
            "max_model_len": LENGTH,
            "events": None,
            **changes,
        }
    )


def native(folder: Path, **changes: Any) -> Engine:
    config = config_of(folder, **changes)
    return engine_of(config, build(config))


def engine_of(config: EngineConfig, runner: Runner) -> Engine:
    """Put the same parts around a runner as a replica's process does."""
    return Engine(config, runner, WallClock(), make_mover(config, runner, None))


@contextmanager
def closing_engine(engine: Engine) -> Iterator[Engine]:
    try:
        yield engine
    finally:
        if engine.mover is not None:
            engine.mover.close()


class Answer:
    """The outputs for one request."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        self.cached_tokens = 0
        self.finish_reason: str | None = None

    def add(self, output: Output) -> None:
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or ()
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.cached_tokens = output.cached_tokens
        self.finish_reason = output.finish_reason


def submit(
    engine: Engine,
    number: int,
    prompt: Sequence[int],
    output: Sequence[int] = (),
    *,
    lora_name: str | None = None,
    **sampling: Any,
) -> None:
    own = Sampling(**{"max_tokens": 16, "temperature": 0.0, "top_logprobs": 3, **sampling})
    asked, said = pack_tokens(prompt), pack_tokens(output)
    refused = engine.submit(Submit(number, asked, own, output=said, lora_name=lora_name, priority=float(number)))
    assert refused is None, refused


def finish(engine: Engine, steps: int = 10_000) -> dict[int, Answer]:
    """Everything that is in the engine, until its end; the invariants are verified now and then."""
    answers: dict[int, Answer] = {}
    for step in range(steps):
        if not engine.busy:
            engine.check()
            return answers
        for output in engine.step():
            answers.setdefault(output.id, Answer()).add(output)
        if step % 8 == 0:
            engine.check()
    raise AssertionError(f"not done after {steps} steps")


def ask(engine: Engine, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[Answer]:
    """All of these at once."""
    for number, prompt in enumerate(prompts):
        submit(engine, number, prompt, **sampling)
    answers = finish(engine)
    return [answers[number] for number in range(len(prompts))]


@torch.no_grad()
def logits(name: str, token_ids: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """The logits of transformers after each of these tokens."""
    model: Any = reference(name) if dtype == torch.float32 else _rounded(name, dtype)
    said: Tensor = model(torch.tensor([list(token_ids)])).logits[0]
    return said.float()


@cache
def _rounded(name: str, dtype: torch.dtype) -> "transformers.PreTrainedModel":
    rounded: Any = deepcopy(reference(name))
    rounded.to(dtype)
    return cast("transformers.PreTrainedModel", rounded)
