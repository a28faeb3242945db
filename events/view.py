"""One replica's cache as its stream tells it: the stream's actions carried out on a decoder and a resolver."""

from collections.abc import Callable, Iterable

from events.actions import Action, Apply, Compare, Replay, Reset, Snapshot
from events.messages import AllBlocksCleared, BadBatch, Decoder, EventBatch
from events.resolver import Change, Resolver
from events.stream import Stream

Request = Replay | Snapshot


class CacheView:
    """Feeds `stream`'s actions to `resolver`; what needs a socket is handed back to the caller.

    `on_change` gets every change of keys, `on_action` every action after it was carried out (with the decoded batch for
    Apply, None otherwise); both are called in the stream's order.
    """

    def __init__(
        self,
        name: str,
        stream: Stream | None = None,
        resolver: Resolver | None = None,
        *,
        skim: bool = False,
        on_change: Callable[[Change], None] | None = None,
        on_action: Callable[[Action, EventBatch | None], None] | None = None,
    ) -> None:
        self.name = name
        self.stream = stream or Stream()
        self.resolver = resolver or Resolver(native=self.stream.config.native)
        self.decoder = Decoder(skim=skim)
        self._on_change = on_change
        self._on_action = on_action

    @property
    def inexact(self) -> str | None:
        """Why the view may differ from the replica's cache, or None while it is exact."""
        if self.resolver.inexact is not None or self.stream.exact:
            return self.resolver.inexact
        return self.stream.doubt

    def perform(self, actions: Iterable[Action]) -> list[Request]:
        """Carries out the actions; returns the requests that the caller has to send."""
        requests: list[Request] = []
        for action in actions:
            batch = None
            if isinstance(action, Apply):
                batch = self._apply(action)
            elif isinstance(action, Reset):
                cleared = self.resolver.reset()
                self.decoder.restart()
                self._changed([cleared])
            elif isinstance(action, Compare):
                if self.resolver.digest() == action.digest:
                    self.stream.matched()
                else:
                    requests += self.perform(self.stream.mismatch())
            elif isinstance(action, Replay | Snapshot):
                requests.append(action)
            if self._on_action is not None:
                self._on_action(action, batch)
        return requests

    def _apply(self, action: Apply) -> EventBatch | None:
        where = f"batch {action.seq} of {self.name}" if action.seq >= 0 else f"a snapshot batch of {self.name}"
        try:
            batch = self.decoder.decode(action.payload, where)
        except BadBatch as error:
            self.perform(self.stream.refused(str(error)))
            return None
        self._changed(self.resolver.apply(batch.events))
        if any(isinstance(event, AllBlocksCleared) for event in batch.events):
            self.stream.cleared(action.seq)
        return batch

    def _changed(self, changes: Iterable[Change]) -> None:
        if self._on_change is not None:
            for change in changes:
                self._on_change(change)
