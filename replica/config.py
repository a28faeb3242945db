"""A replica's configuration. New fields need an option in `replica.cli`; a test compares the two."""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from api.parsing.formats import ReasoningFormat, ToolFormat

EngineName: TypeAlias = Literal["native", "simulated"]
DeviceName: TypeAlias = Literal["auto", "cpu", "cuda"]
Role: TypeAlias = Literal["prefill", "decode", "both"]
DType: TypeAlias = Literal["float32", "bfloat16", "float16"]


class SimulatedConfig(Struct, frozen=True, kw_only=True):
    """The speed of the engine that only pretends to compute.

    Every step reads the weights once, which is what a token of one request alone costs; prefill adds its tokens, and
    every further request that decodes slows the step down a little:

        step_overhead_s + (1 + batch_slowdown * (decoding - 1)) / decode_tokens_per_s
                        + prefill tokens / prefill_tokens_per_s
    """

    prefill_tokens_per_s: float = 8000.0
    decode_tokens_per_s: float = 40.0
    batch_slowdown: float = 0.01
    step_overhead_s: float = 0.001
    mean_output_tokens: int = 128  # the mean length at which the end-of-sequence token falls by itself; 0: never


class LoraModule(Struct, frozen=True):
    """A LoRA adapter: the name that clients ask for, and its folder."""

    name: str
    folder: str


class EngineConfig(Struct, frozen=True, kw_only=True):
    model: str  # the name that clients ask for; part of every block key
    engine: EngineName = "native"
    block_size: int = 16
    num_blocks: int = 8192  # 0: native, what the GPU's memory holds, or 1 GB on a CPU
    host_blocks: int = 0  # blocks of host memory behind the cache; 0: none
    disk_blocks: int = 0  # behind that
    disk_kv: str = ""  # the folder for them
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_step_s: float = 0.0  # the longest step with prefill, by the one before; 0: no limit
    max_model_len: int = 8192
    max_waiting: int = 1024
    role: Role | None = None  # told to routers: which half of a generation is sent here; None: all of it
    enable_prefix_caching: bool = True
    retained_share: float = 0.25  # the largest share of the cache that may be given up last
    enable_partial_reuse: bool = True  # the beginning of a block is used again if the rest differs
    model_path: str = ""  # native: the folder with config.json and the weights
    dtype: DType = "float32"  # native: of weights, activations and KV
    device: DeviceName = "auto"  # native: a GPU if there is one
    attention: str = "auto"  # native: a name of `kernels.backends`
    threads: int = 1  # native, on a CPU: of torch
    gpu_memory_utilization: float = 0.9  # native, on a GPU: of its memory, whoever takes the rest
    graphs: bool = True  # native, on a GPU: of steps that only decode
    lora_modules: tuple[LoraModule, ...] = ()  # native: to load at the start
    simulated: SimulatedConfig = SimulatedConfig()
    eos_token_ids: tuple[int, ...] = ()
    vocabulary: tuple[int, int] = (0, 256)  # simulated: tokens are drawn from this half-open range
    events: str | None = "tcp://127.0.0.1:0"  # None: no events; port 0: any free one
    replay: str | None = "tcp://127.0.0.1:0"
    status: str | None = "tcp://127.0.0.1:0"
    snapshot: str | None = "tcp://127.0.0.1:0"
    topic: str = ""  # empty: kv@<replica>@<model>
    replica: str = ""  # the name in the topic; empty: the host name and the process id
    curve_secret: str | None = None  # files written by `warmroute events keygen`
    curve_clients: str | None = None
    curve_any_client: bool = False
    events_max_peers: int = 64
    events_replay_mib: int = 16
    kv_secret: str | None = None  # shared by all replicas that may read each other's blocks; None: none may
    kv_read: str | None = None  # the endpoint at which they read those of this one
    warm_from: str = ""  # such endpoints of others, with commas, to take their hottest prefixes from at the start
    log_level: str = "info"

    @property
    def keeps_kv(self) -> bool:
        """True if blocks go to a disk or to neighbours, where the digest of the weights tells them from others."""
        return bool(self.disk_blocks or self.kv_read)

    @property
    def retention_size(self) -> int:
        """The block size, in which prompts are retained; 0: they are not."""
        return self.block_size if self.enable_prefix_caching and self.retained_share else 0


class AnswerRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A scripted answer of the simulated engine, for the conversations that have every given feature."""

    text: Annotated[str, Meta(min_length=1)]  # a model's own words, tool calls in the template's format
    last: str | None = None  # a part of the last message's text
    tool_results: Annotated[int, Meta(ge=0)] | None = None  # tool results in the whole conversation
    tool: str | None = None  # the name of a tool that the request offers


class ReplicaConfig(Struct, frozen=True, kw_only=True):
    """The engine, and the HTTP server in front of it."""

    engine: EngineConfig
    host: str = "127.0.0.1"
    port: int = 8001  # 0: any free one
    tokenizer: str | None = None  # a directory or tokenizer.json; None: bytes (simulated only)
    chat_template: str | None = None  # a file; None: the tokenizer's own
    tool_call_parser: ToolFormat = "auto"
    reasoning_parser: ReasoningFormat = "auto"
    simulated_answers: tuple[AnswerRule, ...] = ()
    api_key: str | None = None
    max_body_bytes: int = 32 * 1024 * 1024
    max_bodies_bytes: int = 192 * 1024 * 1024  # the sum over all requests in progress
    drain_timeout_s: float = 60.0
    die_with_parent: bool = False
