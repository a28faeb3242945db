"""Loads and unloads LoRA adapters while requests run, with vLLM's own requests and answers."""

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from api.errors import ApiError, invalid, quoted
from api.openai.engine_requests import LoadAdapterRequest, UnloadAdapterRequest
from api.openai.requests import read
from replica.http.engine_client import EngineClient


class Adapters:
    """`names` may be asked for beside the model's own; they are read elsewhere, too."""

    def __init__(self, engine: EngineClient, model: str, names: set[str], lora_dir: str | None) -> None:
        self.names = names
        self._engine = engine
        self._model = model
        self._lora_dir = lora_dir
        self._changes: set[asyncio.Task[str]] = set()

    async def load(self, body: bytes) -> str:
        asked, allowed = read(body, LoadAdapterRequest), Path(os.path.abspath(self._must_change()))
        # The path is as it is, or below --lora-dir, which it must not lead out of.
        folder = Path(os.path.normpath(allowed / asked.lora_path))
        if not folder.is_relative_to(allowed):
            path = quoted(asked.lora_path)
            raise invalid(f"lora_path {path} is not below the replica's --lora-dir; move it there", "lora_path")
        if asked.lora_name == self._model:
            raise invalid(f"{quoted(asked.lora_name)} is the model's own name; give another one", "lora_name")
        changed = self._engine.load_adapter(asked.lora_name, str(folder))
        error = await self._finished(changed, lambda: self.names.add(asked.lora_name))
        if error:
            raise invalid(error, code="adapter_not_loaded")
        return f"Success: LoRA adapter '{asked.lora_name}' added successfully."

    async def unload(self, body: bytes) -> str:
        name = read(body, UnloadAdapterRequest).lora_name
        self._must_change()
        error = await self._finished(self._engine.unload_adapter(name), lambda: self.names.discard(name))
        if error:
            raise ApiError(404, error, param="lora_name", code="adapter_not_found")
        return f"Success: LoRA adapter '{name}' removed successfully."

    async def _finished(self, change: Coroutine[Any, Any, str], then: Callable[[], object]) -> str:
        """Go on even if the client leaves: the engine does, and the names must say what it has."""

        async def changed() -> str:
            error = await change
            if not error:
                then()
            return error

        task = asyncio.get_running_loop().create_task(changed())
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    def _must_change(self) -> str:
        if self._lora_dir is None:
            message = "adapters are fixed; start the replica with --lora-dir DIR to load those below a folder"
            raise ApiError(400, message, code="adapters_fixed")
        return self._lora_dir
