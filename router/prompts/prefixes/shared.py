"""The response of GET /prefixes (docs/router-api.md describes its fields). New fields go last, with a default."""

from msgspec import Struct


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
    retained_s: float | None = None  # until replicas give it up like any other; None: they do not retain it


class Shared(Struct):
    prompts: int
    span_s: float
    texts: bool
    prefixes: list[Prefix]
