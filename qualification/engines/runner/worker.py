"""A worker for vLLM that computes nothing: it keeps the tokens of its requests, and takes a little time.

Runs inside `vllm serve --worker-cls worker.Worker`, in an environment of its own. All around it is vLLM's: server,
scheduler, cache manager, executor, events. RUNNER_LAYERS names the kinds of the model's layers (`layers`).
"""

import time
from os import environ
from typing import Any

from answers import logprobs, next_token
from found import watch
from handovers import Handovers
from layers import layers
from msgspec import Struct
from transfers import Transfers
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

STEP_S, TOKEN_S = float(environ.get("RUNNER_STEP_S", "0.001")), 0.000005
MEMORY_BYTES = 1 << 34  # more than the blocks that --num-gpu-blocks-override asks for


class Running(Struct):
    tokens: list[int]
    sampling: Any
    prompt_tokens: int


class Worker(WorkerBase):  # type: ignore[misc]
    transfers: Transfers | Handovers | None = None

    def init_device(self) -> None:
        self._running: dict[str, Running] = {}
        self._adapters: set[int] = set()
        self._step: Any = None  # what the scheduler has asked for, until it is sampled
        self._moved: Any = None  # what the connector has moved in that step
        watch(environ["RUNNER_LOG"], connected=self._connector == "OffloadingConnector")

    @property
    def _connector(self) -> str | None:
        return None if self.kv_transfer_config is None else self.kv_transfer_config.kv_connector

    # ---- what the engine asks at its start

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """There are no weights."""

    def get_kv_cache_spec(self) -> dict[str, Any]:
        kinds = environ.get("RUNNER_LAYERS", "full")
        if "mamba" in kinds or kinds == "all":
            self.cache_config.mamba_cache_mode = "align"
        specs: dict[str, Any] = layers(kinds, self.cache_config.block_size)
        return specs

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["LBHNC", "LBNHC", "BLHNC", "BLNHC"]

    def determine_available_memory(self) -> int:
        return MEMORY_BYTES

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        if self._connector == "OffloadingConnector":
            self.transfers = Transfers(self.vllm_config, kv_cache_config)
        elif self._connector == "NixlConnector":
            self.transfers = Handovers(self.kv_transfer_config.engine_id, self._running)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(0.0, 0.0)

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def get_kv_connector_handshake_metadata(self) -> None:
        """There is nobody to shake hands with."""

    # ---- a step

    def execute_model(self, scheduled: Any) -> ModelRunnerOutput | None:
        """Take a step; its tokens are sampled in a second call, which brings the grammars' masks."""
        self._moved = self.transfers.step(scheduled) if self.transfers is not None else None
        for name in scheduled.finished_req_ids:
            self._running.pop(name, None)
        for new in scheduled.scheduled_new_reqs:
            tokens = list(new.prefill_token_ids or new.prompt_token_ids)
            self._running[new.req_id] = Running(tokens, new.sampling_params, len(new.prompt_token_ids))
        if not scheduled.total_num_scheduled_tokens:
            if self._moved is None:
                return EMPTY_MODEL_RUNNER_OUTPUT
            return ModelRunnerOutput.with_kv_conn_output_only(self._moved)
        self._forget_unseen(scheduled.scheduled_cached_reqs)
        time.sleep(STEP_S + TOKEN_S * scheduled.total_num_scheduled_tokens)
        self._step = scheduled
        return None

    def _forget_unseen(self, cached: Any) -> None:
        """After a preemption the scheduler may have dropped tokens that it had not looked at."""
        for name, answered in zip(cached.req_ids, cached.num_output_tokens, strict=True):
            if name in cached.resumed_req_ids:
                running = self._running[name]
                del running.tokens[running.prompt_tokens + answered :]

    def sample_tokens(self, grammar: Any) -> ModelRunnerOutput:
        step, masks = self._step, {}
        if grammar is not None:
            masks = dict(zip(grammar.structured_output_request_ids, grammar.grammar_bitmask, strict=False))
        computed = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        cached = step.scheduled_cached_reqs
        computed |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        names = list(step.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for name in names:
            tokens = self._running[name].tokens
            whole = computed[name] + step.num_scheduled_tokens[name] >= len(tokens)
            sampled.append([next_token(tokens, masks.get(name))] if whole else [])
            tokens += sampled[-1]
        asked = [self._running[name].sampling.logprobs for name in names]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: number for number, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=logprobs(sampled, max(most or 0 for most in asked)) if any(n is not None for n in asked) else None,
            kv_connector_output=self._moved,
        )

    def take_draft_token_ids(self) -> None:
        """It drafts nothing: a model that speculates keeps its cache in another way, and that is all."""

    def execute_dummy_batch(self) -> None:
        """Another rank has work, and this one has none."""

    def sleep(self, level: int = 1) -> None:
        """There is no memory to give back."""

    def wake_up(self, tags: list[str] | None = None) -> None:
        """There is nothing to bring back."""

    # ---- adapters

    def add_lora(self, lora_request: Any) -> bool:
        self._adapters.add(lora_request.lora_int_id)
        return True

    def remove_lora(self, lora_id: int) -> bool:
        self._adapters.discard(lora_id)
        return True

    def pin_lora(self, lora_id: int) -> bool:
        return lora_id in self._adapters

    def list_loras(self) -> set[int]:
        return set(self._adapters)

    def reset_encoder_cache(self) -> None:
        """There is none."""
