"""Scripted engines that hand KV over as vLLM 0.33's NixlConnector does: `kv_transfer_params` in and out.

Their memory is a `Fabric`: what one engine holds for a reader, by engine and request. One read ends it. The real engine
is in qualification/engines.
"""

import json
from collections.abc import Awaitable
from typing import Any
from uuid import uuid4

from api.generation_apis import MESSAGES, PATHS, RESPONSES
from router.members.spec import ReplicaSpec
from router.placement.cost import Role
from tests.router.scripted import MODEL, Call, Scripted, event

ONE_TOKEN = {"/v1/responses": "max_output_tokens"}  # by path; others have max_tokens
HOST, PORT = "10.0.0.7", 5600


class Fabric:
    """The memory of engines in this process."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, str], Any] = {}  # what was computed, by engine and request
        self.read: list[tuple[str, str]] = []

    def hold(self, engine_id: str, request_id: str, prompt: Any) -> None:
        self.held[engine_id, request_id] = prompt

    def take(self, engine_id: str, request_id: str) -> Any:
        """Read what an engine holds, which ends it; None if it holds nothing."""
        self.read.append((engine_id, request_id))
        return self.held.pop((engine_id, request_id), None)

    def dies(self, engine_id: str) -> None:
        """Lose all that an engine holds."""
        self.held = {name: prompt for name, prompt in self.held.items() if name[0] != engine_id}


def prompt_of(body: dict[str, Any]) -> Any:
    return [body.get(name) for name in ("prompt", "messages", "input", "system", "cache_salt")]


class Engine(Scripted):
    """An engine with a KV connector. `transferred` are the parameters that each of its requests had."""

    def __init__(self, name: str, fabric: Fabric, role: Role | None) -> None:
        super().__init__(name, self.serve)
        self.fabric, self.role = fabric, role
        self.control |= {"/kv_event_sources": (404, {}), "/metrics": (200, b"")}
        self.hands_over = True

    @property
    def spec(self) -> ReplicaSpec:
        return ReplicaSpec(name=self.name, url=f"http://127.0.0.1:{self.port}", engine="vllm", role=self.role)

    @property
    def transferred(self) -> list[Any]:
        return [call.json.get("kv_transfer_params") for call in self.calls]

    def serve(self, call: Call) -> Awaitable[None] | None:
        body = call.json
        if (why := self.why_invalid(call.path, body)) is not None:
            call.answer(json.dumps({"error": {"message": why, "type": "BadRequestError", "code": 400}}).encode(), 400)
            return None
        params = body.get("kv_transfer_params") or {}
        handed = self.hold(call, body) if params.get("do_remote_decode") else None
        if params.get("do_remote_prefill") and not self.has_read(params, body):
            self.fails(call, body)
            return None
        self.answers(call, body, handed)
        return None

    @staticmethod
    def why_invalid(path: str, body: dict[str, Any]) -> str | None:
        """The checks of vLLM's request classes that a changed body could fail."""
        if body.get("stream_options") is not None and not body.get("stream"):
            return "Stream options can only be defined when `stream=True`."
        if (body.get("min_tokens") or 0) > (body.get("max_tokens") or 1000):
            return "min_tokens must be less than or equal to max_tokens"
        thinking = body.get("thinking") or {}
        prefills = (body.get("kv_transfer_params") or {}).get("do_remote_decode")
        if path == MESSAGES.path and not prefills and thinking.get("budget_tokens", 0) >= body.get("max_tokens", 1000):
            return "thinking.budget_tokens must be less than max_tokens"
        return None

    def hold(self, call: Call, body: dict[str, Any]) -> dict[str, Any] | None:
        assert body[ONE_TOKEN.get(call.path, "max_tokens")] == 1 and not body["stream"]
        if not self.hands_over:
            return None
        request_id = f"cmpl-{call.header('x-request-id')}-{uuid4().hex[:8]}"
        self.fabric.hold(self.name, request_id, prompt_of(body))
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2, 3]],
            "remote_engine_id": self.name,
            "remote_request_id": request_id,
            "remote_host": HOST,
            "remote_port": PORT,
            "tp_size": 1,
            "remote_num_tokens": 40,
            "remote_prefill_cached_tokens": 16,
            "transfer_mode": "pull",
        }

    def has_read(self, params: dict[str, Any], body: dict[str, Any]) -> bool:
        prompt = self.fabric.take(params["remote_engine_id"], params["remote_request_id"])
        assert prompt in (None, prompt_of(body)), "the blocks are another prompt's"
        return prompt is not None

    def fails(self, call: Call, body: dict[str, Any]) -> None:
        """Say what vLLM says with its usual kv_load_failure_policy; in a stream, after what comes before a token."""
        error = {"error": {"message": "Internal server error", "type": "InternalServerError", "code": 500}}
        if not body.get("stream"):
            call.answer(json.dumps(error).encode(), 500)
            return
        call.begin()
        if call.path == "/v1/messages":
            call.chunk(b"event: message_start\ndata: {}\n\n")
            call.chunk(b'event: error\ndata: {"type":"error"}\n\n')
        else:
            if call.path == "/v1/chat/completions":
                call.chunk(event('{"choices":[{"index":0,"delta":{"role":"assistant"}}]}'))
            if call.path == RESPONSES.path:  # where vLLM only breaks off
                call.chunk(b"event: response.created\ndata: {}\n\nevent: response.in_progress\ndata: {}\n\n")
                call.drop()
                return
            call.chunk(event(json.dumps(error)))
        call.chunk(event("[DONE]"))
        call.end()

    def answers(self, call: Call, body: dict[str, Any], handed: dict[str, Any] | None) -> None:
        if not body.get("stream"):
            whole = {"id": "resp_1", "model": MODEL, "said": self.name, "kv_transfer_params": handed}
            call.answer(json.dumps(whole).encode())
            return
        call.begin()
        for piece in stream_of(call.path, self.name):
            call.chunk(piece)
        call.end()


def stream_of(path: str, said: str) -> list[bytes]:
    """The events of a whole answer at this path."""
    match PATHS[path].name:
        case "messages":
            named = ("message_start", "content_block_start", "content_block_delta", "message_stop")
        case "responses":
            named = ("response.created", "response.in_progress", "response.output_text.delta", "response.completed")
        case "chat":
            role = '{"choices":[{"index":0,"delta":{"role":"assistant"}}]}'
            token = json.dumps({"choices": [{"index": 0, "delta": {"content": said}}]})
            return [event(role), event(token), event("[DONE]")]
        case _:
            return [event(json.dumps({"choices": [{"index": 0, "text": said}]})), event("[DONE]")]
    return [b'event: %b\ndata: {"said":"%b"}\n\n' % (name.encode(), said.encode()) for name in named]
