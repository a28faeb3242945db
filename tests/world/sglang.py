"""A scripted SGLang: where its profile, its events and its answers differ from vLLM's."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from events.messages import BlockRemoved, BlockStored
from router.members.spec import ReplicaSpec
from tests.router.scripted import MODEL
from tests.world.publisher import EVENTS, REPLAY, Cache
from tests.world.replica import BLOCK_TOKENS, PORT, Answering, encode
from tests.world.vllm import VllmAnswering, VllmReplica

HALF = 2**63  # its hashes have a sign
ENDS = b'"stop_reason":null', b'"matched_stop":null'


class SglangReplica(VllmReplica):
    @property
    def spec(self) -> ReplicaSpec:
        return ReplicaSpec(name=self.name, url=f"http://{self.host.address}:{PORT}", engine="sglang", resume=True)

    @property
    def answering(self) -> type[Answering]:
        return SglangAnswering

    def new_cache(self) -> Cache:
        return SglangCache(self.cache_blocks, BLOCK_TOKENS)

    def told(self, path: str, body: bytes) -> tuple[int, bytes] | None:
        if path == "/v1/models":
            return 200, encode({"data": [{"id": MODEL, "owned_by": "sglang", "max_model_len": 4096}]})
        if path == "/server_info":
            sockets = {"endpoint": f"tcp://*:{EVENTS}", "replay_endpoint": f"tcp://*:{REPLAY}"}
            events = encode({"publisher": "zmq", "topic": "kv", **sockets}).decode()
            return 200, encode({"kv_events_config": events, "dp_size": 1, "version": "0.5.23"})
        return None if path == "/kv_event_sources" else super().told(path, body)

    def _metrics(self) -> str:
        pages = f'page_size="{BLOCK_TOKENS}",num_pages="{self.cache_blocks}"'
        return (
            f'sglang:num_running_reqs{{dp_rank="0"}} {len(self.running)}\n'
            f'sglang:num_queue_reqs{{dp_rank="0"}} {len(self.waiting)}\n'
            f'sglang:generation_tokens_total{{dp_rank="0"}} {self.tokens}\n'
            f'sglang:cache_config_info{{dp_rank="0",{pages}}} 1\n'
        )


class SglangAnswering(VllmAnswering):
    def _read(self, body: bytes) -> tuple[bytes, list[int]]:
        prompt, tokens = super()._read(body)
        if self._tells_ids and self._is_chat:
            self.replica.found.append(f"{self.id} asks for token ids in a chat, which it refuses")
        self._pieces = deque(piece.replace(*ENDS) for piece in self._pieces)
        return prompt, tokens

    def give_up(self) -> None:
        """End with its process."""
        self._transport.close()
        self.stop()


class SglangCache(Cache):
    def store(self, keys: Sequence[int], tokens: Sequence[int], salt: str | None) -> list[Any]:
        """Name blocks by its own hashes, and the salt in a field of its own."""
        return [self._named(event, salt) for event in super().store(keys, tokens, salt)]

    @staticmethod
    def _named(event: BlockStored | BlockRemoved, salt: str | None) -> BlockStored | BlockRemoved:
        hashes: list[Any] = [int(key) - HALF for key in event.block_hashes]
        if isinstance(event, BlockRemoved):
            return msgspec.structs.replace(event, block_hashes=hashes)
        parent: Any = event.parent_block_hash
        more = {"parent_block_hash": None if parent is None else parent - HALF, "extra_keys": None}
        return msgspec.structs.replace(event, block_hashes=hashes, cache_salt=salt, **more)
