"""Writes down what the engine's cache manager found for each request: the truth that predictions are held against.

RUNNER_LOG names the file: JSON lines `{"admit": id, "hit": tokens, "lower": tokens, "prompt": token ids, "salt": ...,
"adapter": ..., "pictures": [[name, first token, tokens]], "preempted": ...}`. `lower` is what a connector loads.
"""

import json
import os
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.kv_cache_manager import KVCacheManager


def watch(log_path: str, *, connected: bool) -> None:
    """Log each answer of the cache manager and, if `connected`, of the connector that is asked next."""
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    of_cache, of_connector = KVCacheManager.get_computed_blocks, OffloadingConnector.get_num_new_matched_tokens

    def write(request: Any, hit: int, lower: int) -> None:
        adapter = request.lora_request.lora_name if request.lora_request else None
        line = {"admit": request.request_id, "hit": hit, "lower": lower, "prompt": list(request.prompt_token_ids)}
        pictures = [(one.identifier, one.mm_position.offset, one.mm_position.length) for one in request.mm_features]
        line |= {"salt": request.cache_salt, "adapter": adapter, "pictures": pictures}
        line["preempted"] = request.num_preemptions > 0
        os.write(log, json.dumps(line).encode() + b"\n")

    def get_computed_blocks(self: Any, request: Any, *args: Any) -> Any:
        found = of_cache(self, request, *args)
        if not connected:
            write(request, int(found[1]), 0)
        return found

    def get_num_new_matched_tokens(self: Any, request: Any, num_computed_tokens: int) -> Any:
        found = of_connector(self, request, num_computed_tokens)
        if found[0] is not None:  # otherwise the scheduler asks again
            write(request, num_computed_tokens, int(found[0]))
        return found

    KVCacheManager.get_computed_blocks = get_computed_blocks
    OffloadingConnector.get_num_new_matched_tokens = get_num_new_matched_tokens
