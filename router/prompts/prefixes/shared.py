"""The response of GET /prefixes (docs/router-api.md describes its fields). New fields go last, with a default."""

from msgspec import Struct

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
    sources: dict[str, str] = {}  # of `replicas` that hold a part only in slower memory: CPU, or STORAGE
    retained_s: float | None = None  # until replicas give it up like any other; None: they do not retain it

    def named(self, replica: str) -> str:
        """The replica's name, and the slower memory if it needs it."""
        source = self.sources.get(replica)
        return replica if source is None else f"{replica} ({MEMORY.get(source, source)})"


class Shared(Struct):
    prompts: int
    span_s: float
    texts: bool
    prefixes: list[Prefix]
