"""A scripted vLLM: what its profile reads of it, in front of the same cache, events and tokens as a replica of ours.

It speaks OpenAI's API, names its event sockets, tells its load in metrics, has no status and no drain, and goes on with
half an answer whose tokens are a part of the prompt.
"""

import json
import random
from collections import deque
from collections.abc import Callable

from engines.prompts.vllm import Vllm
from events.blocks import pack_tokens
from router.members.spec import ReplicaSpec
from tests.router.scripted import DONE, MODEL, SSE, event, head_of
from tests.world.network import End, Network
from tests.world.publisher import EVENTS, REPLAY
from tests.world.replica import (
    BLOCK_TOKENS,
    PORT,
    PROMPTS,
    Answering,
    ScriptedReplica,
    encode,
    stream_of,
    tokens_of,
    whole_of,
)

BUILDER = Vllm(PROMPTS)


class VllmReplica(ScriptedReplica):
    health_path = "/health"

    def __init__(self, network: Network, name: str, chance: random.Random, say: Callable[[str, str], None]) -> None:
        super().__init__(network, name, chance, say)
        self.resumes = chance.random() < 0.7  # its streams may go on elsewhere, as its operator says

    @property
    def spec(self) -> ReplicaSpec:
        return ReplicaSpec(name=self.name, url=f"http://{self.host.address}:{PORT}", engine="vllm", resume=self.resumes)

    @property
    def answering(self) -> type[Answering]:
        return VllmAnswering

    def told(self, path: str, body: bytes) -> tuple[int, bytes] | None:
        if path == "/health":
            return 200, b"{}"
        if path == "/v1/models":
            return 200, encode({"data": [{"id": MODEL, "owned_by": "vllm", "max_model_len": 4096}]})
        if path == "/kv_event_sources":
            sockets = {"endpoint": f"tcp://*:{EVENTS}", "replay_endpoint": f"tcp://*:{REPLAY}"}
            return 200, encode({"0": {"publisher": "zmq", "topic": "kv", **sockets}})
        if path == "/tokenize":
            return 200, encode({"tokens": tokens_in(body)})
        return (200, self._metrics().encode()) if path == "/metrics" else None

    def refuses(self, request_id: str, end: End, sent_s: float) -> bytes:
        del request_id, end, sent_s  # the router learns nothing of this code
        return b'{"error":{"code":"shutting_down"}}'

    def _metrics(self) -> str:
        blocks = f'block_size="{BLOCK_TOKENS}",num_gpu_blocks="{self.cache_blocks + 1}"'
        return (
            f'vllm:num_requests_running{{engine="0"}} {len(self.running)}\n'
            f'vllm:num_requests_waiting{{engine="0"}} {len(self.waiting)}\n'
            f'vllm:generation_tokens_total{{engine="0"}} {self.tokens}\n'
            f'vllm:cache_config_info{{engine="0",{blocks}}} 1\n'
        )


def tokens_in(body: bytes) -> list[int]:
    """The tokens of a chat or a completion."""
    asked = BUILDER.read("chat" if "messages" in json.loads(body) else "completions", body)
    [prompt] = asked.texts
    special = asked.special_tokens
    return prompt if isinstance(prompt, list) else PROMPTS.tokenizer.encode(prompt, add_special_tokens=special)


class VllmAnswering(Answering):
    _end = b""

    def _read(self, body: bytes) -> tuple[bytes, list[int]]:
        fields = json.loads(body)
        self.goes_on = "messages" not in fields
        prompt = pack_tokens(tokens_in(body))
        tokens, self.salt = tokens_of(prompt, fields["max_tokens"]), fields.get("cache_salt")
        self._is_chat, self._tells_ids = "messages" in fields, bool(fields.get("return_token_ids"))
        self._streams, told = fields.get("stream", False), (f"chatcmpl-{self.id}", int(self.came_s))
        if not self._streams:
            usage = {"prompt_tokens": len(prompt) // 4, "completion_tokens": len(tokens)}
            pieces = [*(b"" for _ in tokens[1:]), whole_of(tokens, *told, usage=usage)]
        else:
            pieces = stream_of(tokens, 0, *told, chat=self._is_chat, ids=self._tells_ids)
        self._pieces = deque(pieces)
        return prompt, tokens

    def give_up(self) -> None:
        """End as vLLM does at SIGTERM: as if the answer were complete, but for its reason."""
        if self._streams and self.cached is not None:
            choice = {"index": 0, "delta": {}, "text": "", "finish_reason": "abort"}
            self._chunk(event(encode({"id": "", "created": 0, "model": MODEL, "choices": [choice]}).decode()) + DONE)
            self._transport.write(Answering._end)
        else:
            self._transport.close()
        self.stop()

    def _write(self, piece: bytes, tokens: list[int], *, is_first: bool) -> None:
        del tokens
        if not self._streams:
            if piece:
                self._transport.write(head_of(200, {"content_type": "application/json"}, len(piece)) + piece)
            return
        if is_first:
            self._transport.write(head_of(200, {"content_type": SSE}, None))
        self._chunk(piece)
        if not self._pieces:
            self._transport.write(Answering._end)
