"""A radix tree of prompts: each node is a run of blocks that the same prompts share."""

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Optional

from msgspec import Struct

# ---- GET /prefixes (docs/router-api.md describes its fields): new ones go last, with a default

MEMORY = {"CPU": "host memory", "STORAGE": "disk"}


class Prefix(Struct):
    model: str
    exact: bool
    begin: int
    tokens: int
    prompts: int
    idle_s: float
    held_by: int
    replicas: list[str]
    text: str | None = None
    below: list["Prefix"] = []
    id: str = ""  # named by its first block, it stays the same while the tree changes around it
    sources: dict[str, str] = {}  # `replicas` that hold a part only in slower memory: CPU, or STORAGE

    def named(self, replica: str) -> str:
        """The replica's name, and the slower memory if it needs it."""
        source = self.sources.get(replica)
        return replica if source is None else f"{replica} ({MEMORY.get(source, source)})"


class Shared(Struct):
    prompts: int
    span_s: float
    texts: bool
    prefixes: list[Prefix]


class Run:
    """Blocks after those of `parent`. `prompts` counts the prompts that have them all, including those in `below`."""

    __slots__ = ("below", "keys", "last_s", "parent", "prompts", "text")

    def __init__(
        self, parent: Optional["Run"], keys: Sequence[int], prompts: int, last_s: float, text: bytes | None
    ) -> None:
        self.parent = parent
        self.keys = keys
        self.prompts = prompts
        self.last_s = last_s
        self.text = text  # how the texts of all of them begin; None: not all have one
        self.below: dict[int, Run] = {}  # children by their first keys

    def path(self) -> "list[Run]":
        """The runs from the root to this one, without the root."""
        runs: list[Run] = []
        run: Run | None = self
        while run is not None and run.parent is not None:
            runs.append(run)
            run = run.parent
        return runs[::-1]


class Tree:
    def __init__(self) -> None:
        self.root = Run(None, (), 0, 0.0, None)

    def add(self, keys: Sequence[int], at_s: float, text: bytes | None) -> None:
        run, done = self.root, 0
        while True:
            run.text = _both(run.text, text) if run.prompts else text
            run.prompts += 1
            run.last_s = max(run.last_s, at_s)
            if done == len(keys):
                return
            below = run.below.get(keys[done])
            if below is None:
                run.below[keys[done]] = Run(run, keys[done:], 1, at_s, text)
                return
            shared = _alike(below.keys, keys, done)
            done += shared
            if shared < len(below.keys):  # split these off as a new parent
                upper = Run(run, below.keys[:shared], below.prompts, below.last_s, below.text)
                run.below[below.keys[0]] = upper
                below.parent, below.keys = upper, below.keys[shared:]
                upper.below[below.keys[0]] = below
                below = upper
            run = below

    def runs(self) -> Iterator[Run]:
        """All runs but the root, parents first."""
        waiting = [*self.root.below.values()]
        while waiting:
            run = waiting.pop()
            yield run
            waiting += run.below.values()

    def release(self) -> None:
        """Keep only the links to parents: links both ways are cycles, which wait for the garbage collector."""
        for run in [self.root, *self.runs()]:
            run.below.clear()

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        for run in self.runs():
            assert run.keys and run.parent is not None and run.parent.below[run.keys[0]] is run
            assert run.prompts >= sum(below.prompts for below in run.below.values())
            assert run.prompts > max((below.prompts for below in run.below.values()), default=0), "it is no fork"
            assert run.last_s <= run.parent.last_s


def _alike(run: Sequence[int], keys: Sequence[int], start: int) -> int:
    """The number of blocks of the run that the prompt shares from `start` on, at least one."""
    most = min(len(run), len(keys) - start)
    if run[:most] == keys[start : start + most]:  # this runs in C, and is mostly so
        return most
    same, differ = 1, most
    while differ - same > 1:
        middle = (same + differ) // 2
        if run[same:middle] == keys[start + same : start + middle]:
            same = middle
        else:
            differ = middle
    return same


def _both(one: bytes | None, other: bytes | None) -> bytes | None:
    if one is None or other is None:  # a beginning of one alone is not shared
        return None
    if other.startswith(one):
        return one
    same, most = 0, min(len(one), len(other))
    while same < most:
        middle = (same + most + 1) // 2
        if one[same:middle] == other[same:middle]:
            same = middle
        else:
            most = middle - 1
    return one[:same]


def most_shared(trees: Mapping[Tree, int], limit: int) -> list[Run]:
    """The shared runs that a cache saves the most tokens by, with their ancestors.

    Of each tree it is given how many tokens its blocks have.
    """
    shared = [
        ((run.prompts - 1) * len(run.keys) * block_tokens, run)
        for tree, block_tokens in trees.items()
        for run in tree.runs()
        if run.prompts > 1
    ]
    shared.sort(key=itemgetter(0), reverse=True)
    chosen: dict[Run, None] = {}
    for _, run in shared:
        path = [each for each in run.path() if each not in chosen]
        if len(chosen) + len(path) <= limit:
            chosen.update(dict.fromkeys(path))
        if len(chosen) == limit:
            break
    return list(chosen)
