"""Separates a model's reasoning, between two markers at the beginning of an answer, from the answer itself."""

from typing import NamedTuple

from api.parsing.stops import overlap

MAX_SPACES = 1024  # before the first marker


class ReasoningMarkers(NamedTuple):
    begin: str
    end: str


class ReasoningParser:
    """Returns reasoning and the rest.

    Reasoning begins with a marker, or before the answer if the prompt ends with the marker (`opened`). A call that
    begins with `call` ends it, too: some models forget the other marker before a call.
    """

    def __init__(self, markers: ReasoningMarkers, *, opened: bool, call: str = "") -> None:
        self._markers = markers
        self._opened = opened
        self._ends = (markers.end, call) if call else (markers.end,)
        self._state = "before"  # then "within", then "after"
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        if self._state == "after":
            return "", text
        self._held += text
        if self._state == "before":
            start = self._held.lstrip()
            if len(self._held) - len(start) > MAX_SPACES:
                self._state = "within" if self._opened else "after"
            elif start.startswith(self._markers.begin):
                self._state = "within"
                self._held = start[len(self._markers.begin) :]
            elif not self._markers.begin.startswith(start):
                self._state = "within" if self._opened else "after"
        if self._state == "within":
            found = [(place, end) for end in self._ends if (place := self._held.find(end)) >= 0]
            if not found:
                shown = len(self._held) - max(overlap(self._held, end) for end in self._ends)
                reasoning, self._held = self._held[:shown], self._held[shown:]
                return reasoning, ""
            place, end = min(found)
            self._state = "after"
            held = self._taken()
            return held[:place], held[place + len(end) :] if end == self._markers.end else held[place:]
        return "", self._taken() if self._state == "after" else ""

    def finish(self) -> tuple[str, str]:
        held = self._taken()
        return (held, "") if self._state == "within" or (self._opened and self._state == "before") else ("", held)

    def _taken(self) -> str:
        held, self._held = self._held, ""
        return held
