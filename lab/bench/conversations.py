"""Planned conversations, before they are text: each prompt is the conversation so far."""

from typing import NamedTuple

from lab.bench.words import Passage


class Turn(NamedTuple):
    said: tuple[Passage, ...]
    output_tokens: int
    think_s: float = 0.0  # from the end of the answer before to this


class Conversation(NamedTuple):
    name: str
    system: tuple[Passage, ...]  # may be empty
    turns: tuple[Turn, ...]


class Arrival(NamedTuple):
    at_s: float  # after the beginning of the run
    talk: Conversation
