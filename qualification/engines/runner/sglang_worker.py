"""SGLang's own reading of requests, prompts, radix cache, publishers and answers, and nothing computed between them.

In an environment of its own, with the arguments MODEL_FOLDER LOG PORT PAGE_SIZE TOKENS EVENTS [eagle]; EVENTS is JSON.
The scheduler is ours: it finds, inserts and evicts as SGLang's does, one request at a time.
"""

import asyncio
import json
import sys
import time
import zlib
from array import array
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse
from sglang.srt.disaggregation.kv_events import KVEventBatch, ZmqEventPublisher
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, TokenizeRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion
from sglang.srt.entrypoints.openai.serving_tokenize import OpenAIServingTokenize
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.parser.template_manager import TemplateManager
from sglang.srt.runtime_context import get_context
from transformers import AutoConfig, AutoTokenizer

folder, log_path, port, page_size, capacity, published = sys.argv[1:7]
PAGE, CAPACITY, EAGLE = int(page_size), int(capacity), "eagle" in sys.argv[7:]
STEP_S = 0.001  # for each token
LEAVES_S = 0.002  # an answer passes two more processes, and its last events come while it does
EVENTS = json.loads(published)  # the publisher's settings


class Memory:
    """An allocator whose slots are only counted."""

    device = "cpu"

    def free_segment(self, values: torch.Tensor, start_pos: int) -> None:
        """Slots that the tree no longer needs."""


tokenizer = AutoTokenizer.from_pretrained(folder)
cache = RadixCache(
    CacheInitParams(
        disable=False,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=Memory(),
        page_size=PAGE,
        is_eagle=EAGLE,
        enable_kv_cache_events=True,
    )
)
sys.setswitchinterval(0.0005)  # SGLang's server is another process, and holds up no publisher's thread
publisher = ZmqEventPublisher(0, **EVENTS)
log = open(log_path, "a", buffering=1)  # noqa: SIM115
turn = asyncio.Lock()
app = FastAPI()


def key(tokens: list[int], salt: str | None) -> RadixKey:
    return RadixKey(array("q", tokens), is_bigram=EAGLE, cache_salt=salt).page_aligned(PAGE)


def publish() -> None:
    if events := cache.kv_events.take():
        publisher.publish(KVEventBatch(ts=time.time(), events=events))


async def compute(prompt: list[int], salt: str | None, most: int) -> tuple[int, list[int]]:
    """Find the prompt, make room, store the prompt and then its answer; return the hit and the answer."""
    found = cache.match_prefix(MatchPrefixParams(key=key(prompt[:-1], salt)))
    cache.inc_lock_ref(found.last_device_node)
    if (excess := cache.total_size() + len(prompt) + most - found.device_prefix_len - CAPACITY) > 0:
        cache.evict(EvictParams(num_tokens=excess))
    cache.insert(InsertParams(key=key(prompt, salt)))
    publish()
    await asyncio.sleep(most * STEP_S)
    tokens = list(prompt)
    for _ in range(most):
        tokens.append(300 + zlib.crc32(array("q", tokens[-4:]).tobytes()) % 4000)
    cache.insert(InsertParams(key=key(tokens[:-1], salt)))
    cache.dec_lock_ref(found.last_device_node)
    publish()
    await asyncio.sleep(LEAVES_S)
    return found.device_prefix_len, tokens[len(prompt) :]


async def generate_request(asked: Any, request: Request) -> AsyncIterator[list[dict[str, Any]]]:
    """Compute an answer for SGLang's routes: one item for each choice."""
    prompt = list(asked.input_ids or tokenizer.encode(asked.text))
    name, salt = request.headers["x-request-id"], asked.cache_salt
    async with turn:
        hit, answer = await compute(prompt, salt, asked.sampling_params["max_new_tokens"] or 16)
        log.write(json.dumps({"admit": name, "hit": hit, "prompt": prompt, "salt": salt}) + "\n")
    counts = {"prompt_tokens": len(prompt), "completion_tokens": len(answer), "cached_tokens": hit}
    logprobs = [(-1.0, token, tokenizer.decode([token])) for token in answer]
    meta = {"id": name, "finish_reason": {"type": "length"}, "weight_version": "", "output_token_logprobs": logprobs}
    item = {"text": tokenizer.decode(answer), "output_ids": answer, "meta_info": meta | counts}
    yield [item] * (asked.sampling_params.get("n") or 1)


get_context().override_server_args(enable_cache_report=True).install()
model = SimpleNamespace(
    hf_config=AutoConfig.from_pretrained(folder),
    is_multimodal=False,
    context_len=4096,
    get_default_sampling_params=dict,
)
manager = SimpleNamespace(  # the parts of SGLang's TokenizerManager that need no scheduler
    tokenizer=tokenizer,
    processor=None,
    model_config=model,
    model_path=folder,
    served_model_name="m",
    server_args=None,
    request_logger=SimpleNamespace(log_requests=False),
    config_value=get_context().config_leaf,
    generate_request=generate_request,
)
templates = TemplateManager()
templates.initialize_templates(manager, folder)
chats, completions = OpenAIServingChat(manager, templates), OpenAIServingCompletion(manager, templates)
tokens, messages = OpenAIServingTokenize(manager, templates), AnthropicServing(chats)


@app.post("/v1/chat/completions")
async def chat(asked: ChatCompletionRequest, request: Request) -> Any:
    return await chats.handle_request(asked, request)


@app.post("/v1/completions")
async def completion(asked: CompletionRequest, request: Request) -> Any:
    return await completions.handle_request(asked, request)


@app.post("/v1/messages")
async def message(asked: AnthropicMessagesRequest, request: Request) -> Any:
    return await messages.handle_messages(asked, request)


@app.post("/tokenize")
async def tokenize(asked: TokenizeRequest, request: Request) -> Any:
    return await tokens.handle_request(asked, request)


@app.post("/flush_cache")
async def flush() -> str:
    cache.reset()
    publish()
    return "Cache flushed."


@app.get("/v1/models")
async def models() -> dict[str, Any]:
    return {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "sglang", "max_model_len": 4096}]}


@app.get("/server_info")
async def server_info() -> dict[str, Any]:
    config = {"publisher": "zmq", **EVENTS}
    return {"page_size": PAGE, "dp_size": 1, "kv_events_config": json.dumps(config), "version": "0.5.23"}


@app.get("/health")
async def health() -> PlainTextResponse:
    return PlainTextResponse("")


@app.get("/metrics")
async def metrics() -> PlainTextResponse:
    gauges = {"num_running_reqs": 0, "num_queue_reqs": 0, "page_size": PAGE, "num_pages": CAPACITY // PAGE}
    lines = [f'sglang:{name}{{model_name="m"}} {float(value)}\n' for name, value in gauges.items()]
    return PlainTextResponse("".join(lines))


uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
