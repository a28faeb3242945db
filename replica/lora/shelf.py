"""The adapters that requests may ask for; more are read on a thread, and unloaded ones wait for their last requests."""

import logging
from collections.abc import Set
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from replica.cache.block_pool import BlockPool
from replica.messages import AdapterChanged, LoadAdapter, UnloadAdapter, reason_of

if TYPE_CHECKING:  # torch
    from replica.lora.adapter import Adapter, Adapters

log = logging.getLogger(__name__)


class Shelf:
    """Owned by the engine's loop. An adapter is being read, loaded, or leaving."""

    def __init__(self, adapters: "Adapters", most: int) -> None:
        self._adapters = adapters
        self._most = most
        self._leaving: set[str] = set()
        self._reading: dict[str, tuple[LoadAdapter, Future[Adapter]]] = {}  # adapters by name
        self._thread = ThreadPoolExecutor(1, "adapters")

    @property
    def is_reading(self) -> bool:
        return bool(self._reading)

    @property
    def digests(self) -> dict[str, str]:
        """The adapters that requests may ask for, and the digests of their files."""
        loaded = self._adapters.loaded.items()
        return {name: adapter.digest for name, adapter in loaded if name not in self._leaving}

    def load(self, asked: LoadAdapter) -> AdapterChanged | None:
        name, folder, why_not = asked.name, Path(asked.folder), ""
        if name in self._reading:
            why_not = f"the adapter {name!r} is being loaded already"
        elif name in self._leaving:
            why_not = f"requests for the unloaded adapter {name!r} still run; try again when they have ended"
        elif name in self._adapters.loaded:
            why_not = f"the adapter {name!r} is loaded already; unload it first, or give another name"
        elif len(self._adapters.loaded) + len(self._reading) >= self._most:
            why_not = f"{self._most} adapters are loaded, and no more may be (--max-loras); unload one first"
        if why_not:
            return AdapterChanged(asked.id, why_not)
        self._reading[name] = asked, self._thread.submit(self._adapters.read, name, folder)
        return None

    def unload(self, asked: UnloadAdapter) -> AdapterChanged:
        """Take no more requests for it; those that run go on."""
        if asked.name not in self.digests:
            named = ", ".join(self.digests) or "none"
            return AdapterChanged(asked.id, f"the adapter {asked.name!r} is not loaded; loaded are: {named}")
        self._leaving.add(asked.name)
        return AdapterChanged(asked.id)

    def settle(self, pool: BlockPool, in_use: Set[str | None]) -> list[AdapterChanged]:
        """Between steps: drop adapters that leave and that no request has, and add those that have been read."""
        for name in self._leaving - in_use:
            self._leaving.remove(name)
            self._adapters.loaded.pop(name)
        changed = []
        for name, (asked, reading) in list(self._reading.items()):
            if not reading.done():
                continue
            del self._reading[name]
            why_not = ""
            try:
                adapter = reading.result()
            except Exception as error:  # whatever a foreign file makes of torch, it must not end the engine
                log.warning("cannot load the adapter %s from %s: %r", name, asked.folder, error)
                why_not = reason_of(error)
            else:
                if pool.forget_other_adapter(name, adapter.digest):
                    self._adapters.loaded[name] = adapter
                else:
                    why_not = f"neighbours still read blocks of another adapter named {name!r}; try again"
            changed.append(AdapterChanged(asked.id, why_not))
        return changed

    @property
    def waits(self) -> bool:
        """True if `settle` may have something to do."""
        return bool(self._reading or self._leaving)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
