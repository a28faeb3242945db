"""SGLang (0.5.23; what older versions do otherwise is said where it matters)."""

import re
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta, Struct

from engines.metrics import EngineMetrics
from engines.profile import EngineProfile, PromptBuilder, ServerCommand
from engines.sources import MAX_RANKS, NAME_THEM, NO_EVENTS, UNREADABLE, Ask, Publisher, Sources

if TYPE_CHECKING:
    from api.prompts.prompts import Prompts
    from engines.prompts.asked import Question

STEERED = (0, 5, 10)  # the first version that obeys the header of a rank
# It takes its key as an option alone, and everybody on a machine can read a command line: it is added inside.
KEY = "WARMROUTE_SGLANG_API_KEY"
MODULE = f"""import os, runpy, sys
key = os.environ.pop({KEY!r}, None)
sys.argv[1:] += [] if key is None else ["--api-key", key]
runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)"""

METRICS = EngineMetrics(
    rank_labels=("dp_rank",),
    running=("sglang:num_running_reqs",),
    waiting=("sglang:num_queue_reqs",),
    steps=(
        "sglang:num_used_tokens",
        "sglang:token_usage",
        "sglang:prompt_tokens_total",
        "sglang:generation_tokens_total",
    ),
    cache_infos=(("sglang:cache_config_info", "page_size", "num_pages"),),
    cache_gauges=(("sglang:page_size", "sglang:num_pages"),),
    usage=("sglang:token_usage",),
    queries=("sglang:prompt_tokens_total",),
    hits=("sglang:cached_tokens_total",),
    prompts=("sglang:num_requests_total",),
    prompt_tokens=("sglang:prompt_tokens_total",),
    preemptions=("sglang:num_retracted_requests_total", "sglang:num_retracted_reqs_total"),
    evicted_tokens=("sglang:evicted_tokens_total",),
    first_token_s=("sglang:time_to_first_token_seconds",),
    between_tokens_s=("sglang:inter_token_latency_seconds",),
    output_tokens=("sglang:generation_tokens",),
)


class _Described(Struct, frozen=True):
    load_endpoint_port_base: Annotated[int, Meta(ge=1, le=65_535 - MAX_RANKS)] | None = None


class _ServerInfo(Struct, frozen=True):
    """The part of /server_info that describes its events."""

    kv_events_config: str | None = None
    dp_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1
    version: Annotated[str, Meta(max_length=64)] = ""
    kv_events: _Described | None = None


_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})")
_decode = msgspec.json.Decoder(_ServerInfo).decode
_decode_publisher = msgspec.json.Decoder(Publisher).decode


async def sources(ask: Ask) -> Sources:
    answer = await ask("/server_info")
    return read_sources(answer.status, answer.body)


def read_sources(status: int, body: bytes) -> Sources:
    if status != 200:
        return Sources(why_not=f"it answers /server_info with status {status}: {NAME_THEM}", failed=status >= 500)
    try:
        info = _decode(body)
        base = _decode_publisher(config) if (config := info.kv_events_config) else None
        if base is not None and info.kv_events is not None and (port := info.kv_events.load_endpoint_port_base):
            base = msgspec.structs.replace(base, load_endpoint=f"tcp://*:{port}")
    except UNREADABLE as error:
        return Sources(why_not=f"its answer to /server_info cannot be read ({error}): {NAME_THEM}")
    numbers = range(info.dp_size)
    version = _VERSION.match(info.version)
    steered = version is not None and tuple(map(int, version.groups())) >= STEERED
    if base is None or base.publisher != "zmq":
        return Sources(dict.fromkeys(numbers), NO_EVENTS, steered)
    return Sources({number: _offset(base, number) for number in numbers}, steered=steered)


def _offset(base: Publisher, number: int) -> Publisher:
    """A rank's own sockets: it tells only those of rank 0. It binds 0.0.0.0, too."""
    from events.publisher import offset_port  # this import brings sockets

    endpoint, replay, load = base.endpoint or "tcp://*:5557", base.replay_endpoint, base.load_endpoint
    try:
        return msgspec.structs.replace(
            base,
            endpoint=offset_port(endpoint.replace("//0.0.0.0:", "//*:"), number),
            replay_endpoint=None if replay is None else offset_port(replay, number),
            load_endpoint=None if load is None else offset_port(load, number),
        )
    except ValueError:  # no port
        return base


def _prompts(prompts: "Prompts") -> PromptBuilder:
    from engines.prompts.sglang import Sglang

    return Sglang(prompts)


def question(api: str, body: bytes, renders: bool) -> "Question | None":
    from engines.prompts.sglang import tokenized

    return None if renders else tokenized(api, body)  # no route renders, and tells the names of pictures


PROFILE = EngineProfile(
    name="sglang",
    owner="sglang",
    sources=sources,
    metrics=METRICS,
    is_scraped=True,
    takes_token_ids=True,
    tells_ids=frozenset({"completions"}),  # it refuses to in chats
    names_responses=True,
    separates_salts=True,
    rank_header="x-data-parallel-rank",
    transfer_fields=("bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank"),
    placing_fields=("data_parallel_rank", "routed_dp_rank", "routing_key", "http_worker_ipc", "lora_id"),
    prompts=_prompts,
    question=question,
    adapter_routes="",
    reset_path="/flush_cache",
    events_advice="start it with --kv-events-config, at an endpoint that the router can reach",
    batch_option="--max-running-requests",
    server=ServerCommand(
        program="sglang",
        is_module=True,
        missing="this node has no Python with sglang; install SGLang, or name the folder of the Python that has it "
        "in environment = {PATH = '...'}",
        start=("-c", MODULE, "--model-path"),
        ranks="--tp-size",
        tokenizer="--tokenizer-path",
        switches=("--enable-metrics", "--enable-cache-report"),
        key_variable=KEY,
        fleet_keys={"model-path": "model", "tokenizer-path": "tokenizer", "tp-size": "tensor_parallel"},
        rank_options=("dp-size",),
        fleet_options=("enable-metrics",),
    ),
)
