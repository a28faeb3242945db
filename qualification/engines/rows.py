"""The rows of the table: an engine's settings, and the requests that it gets."""

import json
import random
from collections.abc import Callable, Mapping
from os import environ
from pathlib import Path
from typing import Any

from msgspec import Struct

from qualification.engines import traffic
from qualification.engines.engine import VARIABLE
from qualification.engines.traffic import Asked

EAGLE = {"method": "eagle", "model": "MODEL", "num_speculative_tokens": 2}
CPU_BLOCK_BYTES = 4096  # a block of 16 tokens of the runner's layer, as vLLM rounds it


def offloading(blocks: int, **more: object) -> tuple[str, ...]:
    """Options for vLLM's own connector to host memory of so many blocks."""
    extra = {"cpu_bytes_to_use": blocks * CPU_BLOCK_BYTES, **more}
    connector = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return ("--kv-transfer-config", json.dumps(connector))


class Row(Struct, frozen=True, kw_only=True):
    change: Callable[[dict[str, Any], random.Random], Asked] = traffic.chat
    environment: Mapping[str, str] = {}
    options: tuple[str, ...] = ()
    block_size: int = 16
    blocks: int = 512
    algorithm: str = "sha256"
    ranks: int = 1
    clients: int = 1
    sglang: bool = False
    adapters: bool = False
    model: str = "model"  # its folder
    is_asked: bool = False  # the router has no tokenizer
    router: tuple[str, ...] = ()  # more options of the router

    def options_with(self, folder: Path) -> tuple[str, ...]:
        """The engine's options, with the model's path for MODEL, and with adapters made in the folder."""
        model = str(Path(environ[VARIABLE]) / "model")
        options = tuple(option.replace("MODEL", model) for option in self.options)
        if not self.adapters:
            return options
        named = []
        for name in ("a1", "a2"):
            made = folder / name
            made.mkdir(exist_ok=True)
            config = {
                "peft_type": "LORA",
                "r": 8,
                "lora_alpha": 16,
                "target_modules": ["q_proj"],
                "task_type": "CAUSAL_LM",
            }
            (made / "adapter_config.json").write_text(json.dumps(config))
            named.append(f"{name}={made}")
        return (*options, "--enable-lora", "--lora-modules", *named)

    @property
    def engine(self) -> tuple[object, ...]:
        """The settings of its engine: rows with the same ones may share it."""
        environment = tuple(sorted(self.environment.items()))
        return (
            environment,
            self.options,
            self.block_size,
            self.blocks,
            self.algorithm,
            self.ranks,
            self.adapters,
            self.sglang and self.change,  # the replay of a long history loses some of it
            self.model,
        )


RENDERS = ("--enable-scale-out",)
ROWS: dict[str, Row] = {
    "full attention": Row(),
    "blocks of 64": Row(block_size=64, blocks=128),
    "completions": Row(change=traffic.completion),
    "sha256_cbor": Row(algorithm="sha256_cbor"),
    "xxhash": Row(algorithm="xxhash"),
    "xxhash_cbor": Row(algorithm="xxhash_cbor"),
    "salts": Row(change=traffic.salted),
    "LoRA": Row(change=traffic.adapted, adapters=True),
    "tools": Row(change=traffic.with_tools, options=("--enable-auto-tool-choice", "--tool-call-parser", "hermes")),
    "JSON mode": Row(change=traffic.as_json),
    "flags and parts": Row(change=traffic.with_flags),
    "messages": Row(change=traffic.message),
    "responses": Row(change=traffic.response),
    "report mode full": Row(change=traffic.reported_in_full),
    "full + window": Row(environment={"RUNNER_LAYERS": "hybrid"}),
    "window": Row(environment={"RUNNER_LAYERS": "sliding"}),
    "window, sha256_cbor": Row(environment={"RUNNER_LAYERS": "sliding"}, algorithm="sha256_cbor"),
    "full of 16, window of 32": Row(environment={"RUNNER_LAYERS": "sizes"}),
    "full + mamba": Row(environment={"RUNNER_LAYERS": "mamba"}),
    "full of 16, mamba of 64": Row(environment={"RUNNER_LAYERS": "mamba sizes"}),
    "full + window + mamba": Row(environment={"RUNNER_LAYERS": "all"}),
    "full + chunked local": Row(environment={"RUNNER_LAYERS": "chunked"}),
    "EAGLE": Row(options=("--speculative-config", json.dumps(EAGLE))),
    "EAGLE, no look-ahead": Row(
        options=("--speculative-config", json.dumps({**EAGLE, "disable_lookahead_block_hashes": True}))
    ),
    "EAGLE, full + window": Row(
        environment={"RUNNER_LAYERS": "hybrid"}, options=("--speculative-config", json.dumps(EAGLE))
    ),
    "CPU": Row(options=offloading(1024, self_describing_kv_events=True)),
    "CPU, hashes alone": Row(options=offloading(1024)),
    "CPU, chunks of 4": Row(options=offloading(1024, self_describing_kv_events=True, blocks_per_chunk=4)),
    "asked": Row(is_asked=True, options=RENDERS),
    "asked, tools": Row(
        is_asked=True,
        change=traffic.with_tools,
        options=(*RENDERS, "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    ),
    "asked, flags and parts": Row(is_asked=True, change=traffic.with_flags, options=RENDERS),
    "asked, messages": Row(is_asked=True, change=traffic.message, options=RENDERS),
    "asked, responses": Row(is_asked=True, change=traffic.response, options=RENDERS),
    "asked, /tokenize alone": Row(is_asked=True),
    "asked, Mistral's tokenizer": Row(
        is_asked=True, options=(*RENDERS, "--tokenizer", "MODEL/tekken", "--tokenizer-mode", "mistral")
    ),
    # Of a chat, vLLM 0.33 gives this tokenizer's template the first message alone.
    "asked, tiktoken, completions": Row(
        is_asked=True,
        change=traffic.completion,
        options=(*RENDERS, "--tokenizer", "MODEL/tiktoken", "--tokenizer-mode", "kimi_audio"),
    ),
    "asked, DeepSeek V3.2": Row(is_asked=True, options=(*RENDERS, "--tokenizer-mode", "deepseek_v32")),
    "asked, DeepSeek V4": Row(is_asked=True, options=(*RENDERS, "--tokenizer-mode", "deepseek_v4")),
    "asked, images": Row(is_asked=True, change=traffic.with_images, options=RENDERS, model="model/pictures"),
    "2 ranks": Row(ranks=2),
    "4 ranks": Row(ranks=4),
    "5 clients": Row(clients=5),
    "SGLang": Row(sglang=True),
    "SGLang, completions": Row(sglang=True, change=traffic.completion),
    "SGLang, salts": Row(sglang=True, change=traffic.salted),
    "SGLang, tools": Row(sglang=True, change=traffic.with_tools),
    "SGLang, JSON mode": Row(sglang=True, change=traffic.as_json),
    "SGLang, flags and parts": Row(sglang=True, change=traffic.with_flags),
    "SGLang, messages": Row(sglang=True, change=traffic.message),
    "SGLang, pages of 1": Row(sglang=True, block_size=1, blocks=8192),
    "SGLang, pages of 64": Row(sglang=True, block_size=64, blocks=128),
    "SGLang, bigrams": Row(sglang=True, options=("eagle",)),
    "SGLang, bigrams, 1": Row(sglang=True, options=("eagle",), block_size=1, blocks=8192),
    "SGLang, bigrams, 64": Row(sglang=True, options=("eagle",), block_size=64, blocks=128),
}
