"""Which shapes of requests (`engines.asked`) are known to give the engine's own tokens, and at which replicas.

A shape is verified by the engine's own tokens for one request of it, at each replica by itself: replicas of one model
may differ in version and options. Until the first is verified, and as long as one differs, prompts of the shape are
matched approximately.

Clients choose shapes, so all of it is bounded: how many are known, how many are asked about, and how often.
"""

from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

NOT_YET = "its shape is not verified yet"
NOT_THERE = "its shape is not verified at the chosen replica yet"
DIFFERS = "its shape has other tokens there"
MOST_SHAPES = 512  # of one model; the least used one makes room
MOST_PROCESSES = 4096  # at which one shape is verified
RETRY_S, MOST_RETRY_S = 60.0, 3600.0  # after a difference, doubled each time
CONTEXT_TOKENS = 24  # around a difference


class Difference(Struct, frozen=True):
    """The first token that an engine has and we have not, with the text around it at both."""

    replica: str
    position: int
    ours: str
    theirs: str

    def __str__(self) -> str:
        return f"{self.replica} has another token at {self.position}"


class Shape(Struct, eq=False):
    name: str
    at: set[str] = {}  # type: ignore[assignment]  # processes of replicas where it is verified
    differs: dict[str, Difference] = {}  # by process
    again_s: float = 0.0  # when a process that differed may be asked again
    differences: int = 0
    uses: int = 0  # since it was last a candidate for removal

    def __post_init__(self) -> None:
        self.at, self.differs = set(self.at), dict(self.differs)


class Shapes:
    """The shapes of one model. `why_not` may be called from any thread; all else belongs to the event loop."""

    def __init__(self) -> None:
        self.known: dict[str, Shape] = {}
        self.silent: str | None = None  # why its replicas cannot be asked; then tokens are used, and not called exact
        self._ask_again_s = 0.0

    def why_not(self, name: str) -> str | None:
        """The reason why prompts of this shape are not exact; None if they are."""
        shape = self.known.get(name)
        if shape is None:
            return NOT_YET
        shape.uses += 1
        if shape.differs:
            return DIFFERS
        return None if shape.at else NOT_YET

    def is_exact(self, name: str) -> bool:
        shape = self.known.get(name)
        return shape is not None and bool(shape.at) and not shape.differs

    def is_verified_at(self, name: str, process: str) -> bool:
        shape = self.known.get(name)
        return shape is not None and process in shape.at

    def may_ask(self, name: str, process: str, now_s: float) -> bool:
        """Return whether this process is worth a question about the shape now."""
        if self.silent is not None and now_s < self._ask_again_s:
            return False
        shape = self.known.get(name)
        if shape is None:
            return True
        return process not in shape.at and (process not in shape.differs or now_s >= shape.again_s)

    # ---- what was found

    def verified(self, name: str, process: str) -> None:
        shape = self._shape(name)
        self.silent = None
        shape.differs.pop(process, None)
        if len(shape.at) < MOST_PROCESSES:
            shape.at.add(process)

    def differed(self, name: str, process: str, difference: Difference, now_s: float) -> None:
        shape = self._shape(name)
        shape.at.discard(process)
        shape.differs[process] = difference
        shape.again_s = now_s + min(MOST_RETRY_S, RETRY_S * 2**shape.differences)
        shape.differences = min(shape.differences + 1, 16)

    def unanswered(self, why: str, now_s: float) -> None:
        """Note that the engine does not say its tokens at all."""
        self.silent, self._ask_again_s = why, now_s + RETRY_S

    def forget(self, process: str) -> None:
        """Forget a replica that has left or restarted."""
        for shape in self.known.values():
            shape.at.discard(process)
            shape.differs.pop(process, None)

    def differences(self) -> Iterator[tuple[str, Difference]]:
        for shape in self.known.values():
            for difference in shape.differs.values():
                yield shape.name, difference

    def _shape(self, name: str) -> Shape:
        shape = self.known.get(name)
        if shape is None:
            if len(self.known) >= MOST_SHAPES:
                self._make_room()
            shape = self.known[name] = Shape(name)
        return shape

    def _make_room(self) -> None:
        least = min(self.known.values(), key=lambda shape: shape.uses)
        del self.known[least.name]
        for shape in self.known.values():
            shape.uses //= 2


def difference(
    replica: str, ours: Sequence[int], theirs: Sequence[int], text_of: Callable[[list[int]], str]
) -> Difference | None:
    """The first difference between our tokens and the engine's, if there is one."""
    if ours == theirs:
        return None
    shorter = min(len(ours), len(theirs))
    position = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
    around = slice(max(0, position - CONTEXT_TOKENS), position + CONTEXT_TOKENS)
    return Difference(replica, position, text_of(list(ours[around])), text_of(list(theirs[around])))
