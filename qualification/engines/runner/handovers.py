"""The worker's side of vLLM's NixlConnector without KV: what one engine holds for another is a file.

RUNNER_HANDOVERS names a folder that all engines share. A file has the process that holds the blocks, and the tokens of
their prompt; reading it ends it. So a reader finds out if that process is dead, and if the blocks are another prompt's.
"""

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm.v1.outputs import KVConnectorOutput


class Handovers:
    def __init__(self, engine_id: str, running: dict[str, Any]) -> None:
        self._folder = Path(os.environ["RUNNER_HANDOVERS"])
        self._engine_id = engine_id
        self._running = running
        self._held: dict[str, float] = {}  # by request, until when
        self._read: dict[str, list[int]] = {}  # the tokens whose KV each request was given

    def step(self, scheduled: Any) -> KVConnectorOutput:
        """Hold and read what the scheduler says, and tell what has been read by others."""
        jobs, now = scheduled.kv_connector_metadata, time.perf_counter()
        for name, deadline in jobs.reqs_to_send.items():
            self._hold(name, now + deadline - jobs.scheduler_clock)
        received, invalid = set(), set()
        for name, job in jobs.reqs_to_recv.items():
            tokens = self._take(job.remote)
            if not job.awaiting_kvs:
                continue
            received.add(name)
            if tokens is None:
                invalid |= {block for group in job.local_block_ids for block in group}
            else:
                self._read[name] = tokens
        self._compare(scheduled.scheduled_new_reqs)
        sent = {
            name for name, until in self._held.items() if until < now or not self._path(self._engine_id, name).exists()
        }
        for name in sent:
            del self._held[name]
            self._path(self._engine_id, name).unlink(missing_ok=True)
        return KVConnectorOutput(finished_sending=sent, finished_recving=received, invalid_block_ids=invalid)

    def _path(self, engine_id: str, name: str) -> Path:
        return self._folder / f"{engine_id}.{name}"

    def _hold(self, name: str, until: float) -> None:
        held = {"pid": os.getpid(), "tokens": self._running[name].tokens}
        self._path(self._engine_id, name).write_text(json.dumps(held))
        self._held[name] = until

    def _take(self, remote: Any) -> list[int] | None:
        """Read what another engine holds, which ends it; None if that engine does not hold it, or is dead."""
        path = self._path(remote.engine_id, remote.request_id)
        with suppress(FileNotFoundError, ProcessLookupError):
            held = json.loads(path.read_text())
            os.kill(held["pid"], 0)
            path.unlink()
            tokens: list[int] = held["tokens"]
            return tokens
        return None

    def _compare(self, news: Sequence[Any]) -> None:
        """Fail if a request was given the KV of another prompt."""
        for new in news:
            tokens = self._read.pop(new.req_id, None)
            if tokens is not None:
                prompt = list(new.prompt_token_ids)
                assert tokens[: len(prompt)] == prompt, f"{new.req_id} was given the KV of another prompt"
