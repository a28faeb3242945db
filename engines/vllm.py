"""vLLM (0.33; what older versions do otherwise is said where it matters). docs/vllm.md lists what was checked."""

import re
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from engines.metrics import EngineMetrics
from engines.profile import EngineProfile, PromptBuilder, ServerCommand
from engines.sources import MAX_RANKS, NAME_THEM, NO_EVENTS, UNREADABLE, Ask, Publisher, Sources

if TYPE_CHECKING:
    from api.prompts.prompts import Prompts
    from engines.prompts.asked import Question

METRICS = EngineMetrics(
    rank_labels=("engine",),
    running=("vllm:num_requests_running",),
    waiting=("vllm:num_requests_waiting",),
    steps=(
        "vllm:kv_cache_usage_perc",
        "vllm:num_preemptions_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:iteration_tokens_total_sum",
    ),
    awake=(("vllm:engine_sleep_state", 'sleep_state="awake"'),),
    cache_infos=(("vllm:cache_config_info", "block_size", "num_gpu_blocks"),),
    speculating=("vllm:spec_decode_num_drafts",),
    waiting_by_reason=("vllm:num_requests_waiting_by_reason",),
    usage=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    queries=("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    hits=("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    prompts=("vllm:request_prompt_tokens_count", "vllm:request_success_total"),
    prompt_tokens=("vllm:prompt_tokens_total",),
    preemptions=("vllm:num_preemptions_total",),
    caching=(("vllm:cache_config_info", "enable_prefix_caching"),),
    first_token_s=("vllm:time_to_first_token_seconds",),
    prefill_s=("vllm:request_prefill_time_seconds",),
    between_tokens_s=("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    output_tokens=("vllm:request_generation_tokens",),
)

RENDER = {  # since 0.29, with --enable-scale-out
    "chat": "/v1/chat/completions/render",
    "completions": "/v1/completions/render",
    "messages": "/v1/messages/render",
    "responses": "/v1/responses/render",
}
_ENGINES = re.compile(rb'^vllm:num_requests_running\{(?:[^}\n]*,)?engine="([0-9]{1,3})"', re.M)
_decode = msgspec.json.Decoder(
    Annotated[dict[Annotated[int, Meta(ge=0, lt=2**16)], Publisher], Meta(max_length=MAX_RANKS)]
).decode


async def sources(ask: Ask) -> Sources:
    answer = await ask("/kv_event_sources")
    found = read_sources(answer.status, answer.body)
    return found if found.publishers else read_sources(answer.status, answer.body, (await ask("/metrics")).body)


def read_sources(status: int, body: bytes, metrics: bytes = b"") -> Sources:
    """Read the answer to GET /kv_event_sources; `metrics` name the ranks if it does not."""
    engines = sorted({int(number) for number in _ENGINES.findall(metrics)})[:MAX_RANKS]
    silent: dict[int, Publisher | None] = dict.fromkeys(engines)
    if status == 404:
        return Sources(silent, f"vLLM before 0.33 does not tell its event sockets: {NAME_THEM}", steered=False)
    if status != 200:
        why = f"it answers /kv_event_sources with status {status}: {NAME_THEM}"
        return Sources(silent, why, failed=status >= 500)
    try:
        publishers = _decode(body)
    except UNREADABLE as error:
        return Sources(silent, f"its answer to /kv_event_sources cannot be read ({error}): {NAME_THEM}")
    if not publishers:
        return Sources(silent, NO_EVENTS)
    return Sources(dict(sorted(publishers.items())))


def _prompts(prompts: "Prompts") -> PromptBuilder:
    from engines.prompts.vllm import Vllm

    return Vllm(prompts)


def question(api: str, body: bytes, renders: bool) -> "Question | None":
    from engines.prompts.asked import Question
    from engines.prompts.vllm import tokenized

    if renders:  # without the pixels of its images; of two equal fields the last one counts
        return Question(body.rstrip()[:-1] + b',"mm_payload":"none"}', path=RENDER[api]) if api in RENDER else None
    return tokenized(api, body) if api in ("chat", "completions") else None


PROFILE = EngineProfile(
    name="vllm",
    owner="vllm",
    sources=sources,
    metrics=METRICS,
    is_scraped=True,
    unused_blocks=1,
    takes_token_ids=True,
    tells_ids=frozenset({"chat", "completions"}),  # since 0.10.2
    names_responses=True,
    separates_salts=True,
    rank_header="x-data-parallel-rank",
    transfer_fields=("kv_transfer_params", "ec_transfer_params"),
    nesting_fields=("vllm_xargs", "sampling_params", "extra_args"),
    plugin_fields=("vllm_xargs",),
    hand_over=b',"stream":false,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,'
    b'"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}}',
    hand_over_advice="start it with a KV connector (docs/vllm.md)",
    prompts=_prompts,
    question=question,
    hides_aborts=True,
    events_advice="start it with --kv-events-config; before vLLM 0.33 also tell the router: "
    "--replica url=URL,engine=vllm,events=tcp://HOST:PORT,replay=tcp://HOST:PORT",
    server=ServerCommand(
        program="vllm",
        missing="this node has no program vllm; install vLLM, or name its folder in environment = {PATH = '...'}",
        start=("serve",),
        ranks="--tensor-parallel-size",
        tokenizer="--tokenizer",
        # The last one: so that answers say what the cache had of the prompt.
        switches=("--enable-prefix-caching", "--enable-prompt-tokens-details"),
        events={"enable_kv_cache_events": True},
        key_variable="VLLM_API_KEY",
        negates=True,
        fleet_keys={"tokenizer": "tokenizer"},
        rank_options=("data-parallel-rank", "dpr", "data-parallel-size-local"),
        fleet_options=("uds", "grpc", "headless", "enable-prefix-caching", "no-enable-prefix-caching"),
    ),
)
