"""Adapters that are loaded while the ranks of an engine run: each reads the files, and keeps its own shares.

They read on threads beside the steps, and tell the engine when they have. Once all have read the same, it says between
two steps that there is this adapter, so all have it from the same step on.
"""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from replica.lora.adapter import Adapter, Adapters, Others
from replica.messages import reason_of
from replica.parallel import messages
from replica.parallel.followers import Followers
from replica.parallel.following import Channel

CHANGED = "the files of the adapter {!r} changed while they were read; try again"


def loaded_with(adapters: Adapters) -> messages.Ready:
    """Tell the engine which files this rank has read at the start."""
    return messages.Ready({name: adapter.digest for name, adapter in adapters.loaded.items()})


def refuse_other_files(adapters: Adapters, others: Iterable[messages.Ready]) -> None:
    """ValueError: other ranks have read something else at the start."""
    for other in others:
        for name, adapter in adapters.loaded.items():
            if other.adapters[name] != adapter.digest:
                raise ValueError(CHANGED.format(name))


class Reading(NamedTuple):
    """An adapter that followers read, and those that have."""

    number: int
    answers: list[messages.AdapterRead]


class OthersAdapters(Others):
    """The engine's side."""

    def __init__(self, followers: Followers) -> None:
        self._followers = followers
        self._reading: dict[str, Reading] = {}  # adapters by name
        self._numbered = 0

    def read(self, name: str, folder: Path) -> None:
        self._numbered += 1
        self._reading[name] = Reading(self._numbered, [])
        self._followers.tell(messages.ReadAdapter(self._numbered, name, str(folder)))

    def have_read(self, name: str) -> bool:
        by_number = {reading.number: reading for reading in self._reading.values()}
        for answer in self._followers.new_answers(messages.decode_read):
            if (reading := by_number.get(answer.number)) is not None:  # not of one that has been dropped
                reading.answers.append(answer)
        return len(self._reading[name].answers) == len(self._followers.pids)

    def add(self, name: str, digest: str) -> str:
        for answer in self._reading.pop(name).answers:
            if answer.failure:
                return answer.failure
            if answer.digest != digest:
                return CHANGED.format(name)
        self._followers.tell(messages.AddAdapter(name))
        return ""

    def drop(self, name: str) -> None:
        self._reading.pop(name, None)
        self._followers.tell(messages.DropAdapter(name))


class OwnAdapters:
    """A follower's side."""

    def __init__(self, adapters: Adapters, channel: Channel) -> None:
        self._adapters = adapters
        self._channel = channel  # on which only the thread sends
        self._reading: dict[str, Future[Adapter | None]] = {}  # adapters by name
        self._thread = ThreadPoolExecutor(1, "adapters")

    def obey(self, order: messages.OfAdapters) -> None:
        if isinstance(order, messages.ReadAdapter):
            self._reading[order.name] = self._thread.submit(self._read, order)
        elif isinstance(order, messages.AddAdapter):
            adapter = self._reading.pop(order.name).result()
            assert adapter is not None, "the engine adds only what all have read"
            self._adapters.loaded[order.name] = adapter
        else:
            self._adapters.loaded.pop(order.name, None)
            if (reading := self._reading.pop(order.name, None)) is not None:
                reading.cancel()

    def _read(self, order: messages.ReadAdapter) -> Adapter | None:
        adapter, done = None, messages.AdapterRead(order.number)
        try:
            adapter = self._adapters.read(order.name, Path(order.folder))
            done.digest = adapter.digest
        except Exception as error:  # whatever a foreign file makes of torch, it must not end the engine
            done.failure = reason_of(error)
        self._channel.send_bytes(messages.encode(done))
        return adapter
