"""Replicas that keep responses as engines do: by the id that the request gives, in memory, for whoever asks."""

import json
import secrets
from typing import Any

from api.native import REQUEST_TYPE
from router.members.spec import ReplicaSpec
from tests.router.scripted import MODEL, Call, Scripted

PATH = "/v1/responses"
GONE = b'{"error":{"message":"not found","code":404}}'


class Keeping(Scripted):
    """`kept` are its responses by id: the items of each conversation. It obeys `request_id` unless it is "openai"."""

    def __init__(self, name: str, engine: str = "vllm", models: tuple[str, ...] = (MODEL,)) -> None:
        super().__init__(name, self.serve, native=engine == "warmroute", models=models)
        self.kind = engine
        self.kept: dict[str, list[Any]] = {}
        self.is_silent = False

    @property
    def spec(self) -> ReplicaSpec:
        return ReplicaSpec(name=self.name, url=f"http://127.0.0.1:{self.port}", engine=self.kind)

    async def serve(self, call: Call) -> None:
        parts = call.path.split("/")[3:] if call.path.startswith(PATH) else None
        if self.is_silent:
            await call.left()
        elif parts is None:
            call.answer(b"{}", 404)
        elif not parts:
            self.make(call)
        elif parts[0] not in self.kept:
            call.answer(GONE, 404)
        else:
            items = self.kept[parts[0]] if call.method != "DELETE" else self.kept.pop(parts[0])
            call.answer(json.dumps({"id": parts[0], "items": items}).encode())

    def make(self, call: Call) -> None:
        enveloped = call.header("content-type") == REQUEST_TYPE
        native, body = call.native if enveloped else (None, call.json)
        given = native.response_id if native is not None else body.get("request_id") if self.kind != "openai" else None
        response_id = given or f"resp_{secrets.token_hex(16)}"
        previous, said = body.get("previous_response_id"), body["input"]
        before = body.get("previous_items") or (self.kept.get(previous) if previous else [])
        if before is None:
            call.answer(GONE, 404)
            return
        items = [*before, *([{"role": "user", "content": said}] if isinstance(said, str) else said)]
        if body.get("referenced_items"):
            named = {item.get("id"): item for item in body["referenced_items"]}
            items = [named[item["id"]] if item.get("type") == "item_reference" else item for item in items]
        text = {"type": "message", "id": f"msg_{response_id[5:]}_0", "role": "assistant", "content": "answer"}
        if body.get("store", True):
            self.kept[response_id] = [*items, text]
        answer = json.dumps({"id": response_id, "model": body["model"], "output": [text], "conversation": items})
        if enveloped:
            call.begin_frames("application/json")
            call.frame(answer.encode(), 104)
            call.end()
        else:
            call.answer(answer.encode())
