"""Ends a text at a stop string, and holds back text that may become part of one.

What has been shown after a text depends only on that text, never on how it was cut into pieces: a request that is
resumed on another replica relies on it. So the stop string that is complete first wins, and of several that are
complete at the same character the longest.
"""

from collections.abc import Sequence


class StopStrings:
    """The stop strings of one choice, and the text held back."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        if "" in stops:
            raise ValueError("a stop string is empty; leave it out")
        self.stopped: str | None = None  # the stop string that ended the text
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def feed(self, text: str) -> str:
        """Add text; return the text that may be shown now."""
        if not self._stops:
            return text
        if self.stopped is not None:
            return ""
        text = self._held + text
        # A stop string cannot begin before the held text, which is the longest end that may still become one.
        found = [(start + len(stop), stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            end, self.stopped = min(found, key=lambda end_and_stop: (end_and_stop[0], -len(end_and_stop[1])))
            self._held = ""
            return text[: end if self._include else end - len(self.stopped)]
        shown = len(text) - max(overlap(text, stop) for stop in self._stops)
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """Return the text held back, at the end of the output."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """The length of the longest start of the stop string at the end of the text."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0
