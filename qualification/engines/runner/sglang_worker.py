"""SGLang's own radix cache, block recorder and publisher behind a small HTTP server that computes nothing.

In an environment of its own, with the arguments MODEL_FOLDER LOG PORT PAGE_SIZE TOKENS EVENTS [eagle]; EVENTS is JSON.
The server around them is ours: it finds, inserts and evicts as SGLang's scheduler does, one request at a time.
"""

import asyncio
import json
import sys
import time
import uuid
import zlib
from array import array
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from sglang.srt.disaggregation.kv_events import KVEventBatch, ZmqEventPublisher
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from transformers import AutoTokenizer

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


async def answered(request: Request, body: dict[str, Any], prompt: list[int], kind: str) -> dict[str, Any]:
    """Compute an answer; return it with all but the choice that holds its text."""
    name = request.headers.get("x-request-id") or uuid.uuid4().hex
    async with turn:
        hit, answer = await compute(prompt, body.get("cache_salt"), body.get("max_tokens") or 16)
        log.write(json.dumps({"admit": name, "hit": hit, "prompt": prompt, "salt": body.get("cache_salt")}) + "\n")
    usage = {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(answer),
        "total_tokens": len(prompt) + len(answer),
        "prompt_tokens_details": {"cached_tokens": hit},
    }
    text = tokenizer.decode(answer)
    said = {"message": {"role": "assistant", "content": text}} if kind == "chat.completion" else {"text": text}
    choice = {"index": 0, "finish_reason": "length", **said}
    return {"id": name, "object": kind, "created": 0, "model": body["model"], "choices": [choice], "usage": usage}


@app.post("/v1/chat/completions")
async def chat(request: Request) -> dict[str, Any]:
    body = await request.json()
    text = tokenizer.apply_chat_template(
        body["messages"], tools=body.get("tools"), tokenize=False, add_generation_prompt=True
    )
    return await answered(request, body, tokenizer.encode(text, add_special_tokens=False), "chat.completion")


@app.post("/v1/completions")
async def completion(request: Request) -> dict[str, Any]:
    body = await request.json()
    prompt = body["prompt"]
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    return await answered(request, body, ids, "text_completion")


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


@app.post("/tokenize")
async def tokenize(request: Request) -> JSONResponse:
    body = await request.json()
    tokens = tokenizer.encode(body["prompt"], add_special_tokens=body.get("add_special_tokens", True))
    return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": 4096})


uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
