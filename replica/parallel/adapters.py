"""Adapters that are loaded while the ranks of an engine run: each reads its own shares of the weights.

They read on threads beside the steps. The engine says between two steps when all are to have an adapter, and so do all
from the same step on.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from replica.parallel.followers import Followers
from replica.parallel.messages import (
    AddAdapter,
    DropAdapter,
    Failed,
    OfAdapters,
    ReadAdapter,
    Ready,
    decode_answer,
    encode,
)

if TYPE_CHECKING:  # torch
    from replica.lora.adapter import Adapter, Adapters
    from replica.parallel.following import Channel


class OthersAdapters:
    """The engine's side."""

    def __init__(self, followers: Followers) -> None:
        self._followers = followers

    def read(self, name: str, folder: Path) -> None:
        """Let them begin to read an adapter."""
        self._followers.tell(ReadAdapter(name, str(folder)))

    def add(self, name: str, digest: str) -> str:
        """Wait until all have read it, and return why one of them could not, or nothing."""
        self._followers.tell(AddAdapter(name, digest))
        failed = [one.message for one in self._followers.all_answers(decode_answer) if isinstance(one, Failed)]
        return failed[0] if failed else ""

    def drop(self, name: str) -> None:
        self._followers.tell(DropAdapter(name))


class OwnAdapters:
    """A follower's side."""

    def __init__(self, adapters: "Adapters") -> None:
        self._adapters = adapters
        self._reading: dict[str, Future[Adapter]] = {}  # by name
        self._thread = ThreadPoolExecutor(1, "adapters")

    def obey(self, order: OfAdapters, channel: "Channel") -> None:
        if isinstance(order, ReadAdapter):
            self._reading[order.name] = self._thread.submit(self._adapters.read, order.name, Path(order.folder))
        elif isinstance(order, AddAdapter):
            failure = self._add(order)
            channel.send_bytes(encode(Failed(failure) if failure else Ready()))
        else:
            self._reading.pop(order.name, None)
            self._adapters.loaded.pop(order.name, None)

    def _add(self, order: AddAdapter) -> str:
        """Return why it cannot be added, or nothing."""
        try:
            adapter = self._reading.pop(order.name).result()
        except Exception as error:  # whatever a foreign file makes of torch, it must not end the engine
            return str(error) or repr(error)
        if adapter.digest != order.digest:
            return f"the files of the adapter {order.name!r} changed while they were read; load it again"
        self._adapters.loaded[order.name] = adapter
        return ""
