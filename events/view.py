"""One replica's cache as its stream tells it: the stream's actions carried out on a decoder and a resolver."""

from collections.abc import Callable, Generator, Iterable, Iterator

from events.cache.changes import Change, Cleared, Removed
from events.cache.resolver import Resolver
from events.cache.slices import SLICE_BLOCKS, blocks_of, slices
from events.messages import AllBlocksCleared, BadBatch, Decoder, Event, EventBatch
from events.stream.actions import Action, Apply, Compare, Partial, Replay, Reset, Snapshot
from events.stream.foreign_stream import ForeignStream
from events.stream.stream import Stream

Request = Replay | Snapshot

SHORT_BYTES = 16 * 1024  # a batch of this size is applied in one piece
SHORTEST_BLOCK_BYTES = 16


class CacheView:
    """Feeds `stream`'s actions to `resolver`; what needs a socket is handed back to the caller.

    `on_change` gets every change of keys, `on_action` every action after it was carried out (with the decoded batch for
    Apply, None otherwise); both are called in the stream's order.

    `sliced`: apply long batches in slices. While the view is `busy` it may be given nothing more, until `go_on` has
    done the rest; then `on_action` gets no batches, and a cleared cache is told of as removed blocks first.
    """

    def __init__(
        self,
        name: str,
        stream: Stream | None = None,
        resolver: Resolver | None = None,
        *,
        skim: bool = False,
        sliced: bool = False,
        on_change: Callable[[Change], None] | None = None,
        on_action: Callable[[Action, EventBatch | None], None] | None = None,
    ) -> None:
        self.name = name
        self.stream: Stream = stream or ForeignStream()
        self.resolver = resolver or Resolver(native=self.stream.native)
        self.decoder = Decoder(skim=skim)
        self._on_change = on_change
        self._on_action = on_action
        self._sliced = sliced
        self._rest: Iterator[int] | None = None
        self._requests: list[Request] = []
        self.may_be_cleared = False  # the replica was asked to clear its cache, and no event says so yet

    @property
    def busy(self) -> bool:
        """True while slices are left to do."""
        return self._rest is not None

    @property
    def inexact(self) -> str | None:
        if self.resolver.inexact is not None:
            return self.resolver.inexact
        if self._rest is not None:
            return "a long batch is being applied"
        if self.may_be_cleared:
            return "the replica was asked to clear its cache, and no event has shown yet whether it did"
        return None if self.stream.exact else self.stream.doubt

    def perform(self, actions: Iterable[Action]) -> list[Request]:
        """Carry out the actions; return the requests that the caller has to send."""
        assert self._rest is None, "the last batch is not applied yet"
        if self._sliced and isinstance(actions, list) and len(actions) == 1:  # the usual case: one short batch
            action = actions[0]
            if isinstance(action, Apply) and len(action.payload) <= SHORT_BYTES and self._apply_short(action):
                if self._on_action is not None:
                    self._on_action(action, None)
                if not self._is_doubted:
                    return []
                actions = self._doubted(self.stream.last_seq)
        self._rest = self._steps(actions)
        return self.go_on()

    def go_on(self) -> list[Request]:
        """Apply one slice of the pending batch, or all of it; return the resulting requests."""
        rest, self._rest = self._rest, None
        blocks = 0
        for done in rest or ():
            blocks += done
            if self._sliced and blocks >= SLICE_BLOCKS:
                self._rest = rest
                break
        requests, self._requests = self._requests, []
        return requests

    def _steps(self, actions: Iterable[Action]) -> Iterator[int]:
        """Carry out the actions; yield now and then about how many blocks that took."""
        for action in actions:
            batch = None
            if isinstance(action, Apply):
                if self._sliced and len(action.payload) <= SHORT_BYTES and self._apply_short(action):
                    yield len(action.payload) // SHORTEST_BLOCK_BYTES
                else:
                    batch = yield from self._apply(action)
                if self._is_doubted:
                    yield from self._steps(self._doubted(action.seq))
            elif isinstance(action, Reset):
                self.decoder.restart()
                self.resolver.restarted()
                yield from self._emptied(self.resolver.reset())
            elif isinstance(action, Partial) and self.stream.must_forget:
                yield from self._emptied(self.resolver.lose())
            elif isinstance(action, Compare) and self.resolver.digest() == action.digest:
                self.stream.matched()
                self.resolver.capacity.forgive()
            elif isinstance(action, Compare):
                # If its blocks are more than are kept, `inexact` says so: a snapshot would not help.
                if not self.resolver.capacity.is_too_small_for(action.digest.blocks):
                    yield from self._steps(self.stream.mismatch())
            elif isinstance(action, Replay | Snapshot):
                self._requests.append(action)
            if self._on_action is not None:
                self._on_action(action, batch)

    def _apply_short(self, action: Apply) -> bool:
        """False, and nothing is done, where the batch clears the cache or cannot be read."""
        try:
            events = self.decoder.decode(action.payload).events
        except BadBatch:
            return False
        if _clear(events):
            return False
        self._changed(self.resolver.apply(events))
        return True

    def _apply(self, action: Apply) -> Generator[int, None, EventBatch | None]:
        """Return the batch, unless it is read in slices or cannot be read."""
        batch, clears = None, False
        try:
            if self._sliced:
                parts = slices(self.decoder.events(action.payload, self._name_of(action)))
            else:
                batch = self.decoder.decode(action.payload, self._name_of(action))
                parts = iter([batch.events])
            for events in parts:
                if not _clear(events):
                    self._changed(self.resolver.apply(events))
                    yield sum(map(blocks_of, events))
                    continue
                clears = True
                for event in events:
                    if isinstance(event, AllBlocksCleared):
                        self.resolver.stats.cleared += 1
                        self.may_be_cleared = False
                        yield from self._emptied(self.resolver.reset())
                    else:
                        self._changed(self.resolver.apply([event]))
        except BadBatch as error:
            yield from self._steps(self.stream.refused(str(error)))
            return None
        if clears:
            self.stream.cleared(action.seq)
        return batch

    @property
    def _is_doubted(self) -> bool:
        """True if a batch may have shown more than its changes: a loss, or that an earlier one no longer matters."""
        return self.stream.partial is not None or (self.resolver.lost is not None and self.stream.must_forget)

    def _doubted(self, seq: int) -> list[Action]:
        if self.resolver.lost is not None and self.stream.must_forget:
            return self.stream.refused(self.resolver.lost)
        if self.resolver.complete:
            self.resolver.complete = False
            self.stream.cleared(seq)
        return []

    def _emptied(self, cleared: Cleared) -> Iterator[int]:
        if not self._sliced:
            self._changed([cleared])
            return
        for medium, group, keys in cleared.held:
            while keys:
                part = [keys.pop() for _ in range(min(len(keys), SLICE_BLOCKS))]
                self._changed([Removed(medium, part, group)])
                yield len(part)
        self._changed([Cleared()])

    def _name_of(self, action: Apply) -> str:
        return f"batch {action.seq} of {self.name}" if action.seq >= 0 else f"a snapshot batch of {self.name}"

    def _changed(self, changes: Iterable[Change]) -> None:
        if self._on_change is not None:
            for change in changes:
                self._on_change(change)


def _clear(events: Iterable[Event]) -> bool:
    return any(isinstance(event, AllBlocksCleared) for event in events)
