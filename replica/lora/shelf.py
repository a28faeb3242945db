"""The adapters that requests may ask for; more are read on a thread, and unloaded ones wait for their last requests."""

import logging
from collections.abc import Iterator, Set
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
        self._reading: dict[str, tuple[LoadAdapter, Future[Adapter]]] = {}  # by name
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
        """Begin to read an adapter, or say why not."""
        if why_not := self._why_not(asked.name):
            return AdapterChanged(asked.id, why_not)
        folder = Path(asked.folder)
        self._adapters.begin(asked.name, folder)
        self._reading[asked.name] = asked, self._thread.submit(self._adapters.read, asked.name, folder)
        return None

    def _why_not(self, name: str) -> str:
        if name in self._reading:
            return f"the adapter {name!r} is being loaded already"
        if name in self._leaving:
            return f"requests for the unloaded adapter {name!r} still run; try again when they have ended"
        if name in self._adapters.loaded:
            return f"the adapter {name!r} is loaded already; unload it first, or give another name"
        if len(self._adapters.loaded) + len(self._reading) >= self._most:
            return f"{self._most} adapters are loaded, and no more may be (--max-loras); unload one first"
        return ""

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
            self._adapters.drop(name)
        return [AdapterChanged(asked.id, self._add(asked.name, found, pool)) for asked, found in self._take_read()]

    def _add(self, name: str, found: "Adapter | str", pool: BlockPool) -> str:
        """Return why it could not be added, or nothing."""
        if isinstance(found, str):
            why_not = found
        elif not pool.forget_other_adapter(name, found.digest):
            why_not = f"neighbours still read blocks of another adapter named {name!r}; try again"
        else:
            return self._adapters.add(found)
        self._adapters.drop(name)
        return why_not

    def _take_read(self) -> "Iterator[tuple[LoadAdapter, Adapter | str]]":
        for name, (asked, reading) in list(self._reading.items()):
            if reading.done() and (reading.exception() is not None or self._adapters.others_have_read(name)):
                del self._reading[name]
                try:
                    yield asked, reading.result()
                except Exception as error:  # whatever a foreign file makes of torch, it must not end the engine
                    log.warning("cannot load the adapter %s from %s: %r", name, asked.folder, error)
                    yield asked, reason_of(error)

    @property
    def waits(self) -> bool:
        """True if `settle` may have something to do."""
        return bool(self._reading or self._leaving)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
