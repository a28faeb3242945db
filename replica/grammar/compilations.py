"""Compiles the constraints of new requests on a thread, beside the engine's loop, which takes them when they are done.

The compiler lets go of the interpreter while it works. What it is given was tried before, by `replica.grammar.trial`.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

from api.native import unpack_ids
from api.openai.constraints import Constraint
from replica.grammar.matcher import Matcher
from replica.grammar.vocabulary import unpacked_vocabulary
from replica.messages import Refused, Submit

if TYPE_CHECKING:
    from replica.grammar.compiler import Compiler


class Compiled(NamedTuple):
    submits: list[Submit]
    matchers: list[Matcher]  # one of each


class Compilations:
    def __init__(self, most_waiting: int) -> None:
        self._most_waiting = most_waiting
        self._thread = ThreadPoolExecutor(1, "compile")
        self._compiler: Future[Compiler] | None = None
        self._waiting: dict[int, tuple[list[Submit], Future[list[Matcher]]]] = {}  # matchers by the first submit's id
        self._cancelled: set[int] = set()

    def __bool__(self) -> bool:
        """True while some have not been taken."""
        return bool(self._waiting)

    def learn(self, packed: bytes) -> None:
        """Take the vocabulary, without which nothing can be compiled."""
        self._compiler = self._thread.submit(compiler_for, packed)

    def add(self, submits: list[Submit]) -> Refused | None:
        """Compile the constraint that all of them share, or say why not."""
        constraint, compiler = submits[0].sampling.constraint, self._compiler
        assert constraint is not None
        if compiler is None:
            return Refused(submits[0].id, "invalid", "a constraint came before the vocabulary that it is compiled for")
        if len(self._waiting) >= self._most_waiting:
            message = f"{len(self._waiting)} constraints wait to be compiled, and no more may; try again"
            return Refused(submits[0].id, "full", message, 1.0)
        compiled = self._thread.submit(lambda: matchers_of(constraint, submits, compiler.result()))
        self._waiting[submits[0].id] = submits, compiled
        return None

    def cancel(self, request_id: int) -> None:
        if any(request_id == submit.id for submits, _ in self._waiting.values() for submit in submits):
            self._cancelled.add(request_id)

    def take(self) -> Iterator[Compiled | Refused]:
        """Take those that are compiled, without the cancelled ones, in the order in which they came."""
        while self._waiting:
            first, (submits, compiled) = next(iter(self._waiting.items()))
            if not compiled.done():
                return
            del self._waiting[first]
            wanted = [submit.id not in self._cancelled for submit in submits]
            self._cancelled.difference_update(submit.id for submit in submits)
            try:
                matchers = compiled.result()
            except ValueError as error:
                yield Refused(first, "invalid", str(error))
                continue
            chosen = list(compress(zip(submits, matchers, strict=True), wanted))
            if chosen:
                yield Compiled([submit for submit, _ in chosen], [matcher for _, matcher in chosen])

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


# ---- on the thread


def compiler_for(packed: bytes) -> "Compiler":
    from replica.grammar.compiler import Compiler  # llguidance, which an engine without constraints does not need

    return Compiler(unpacked_vocabulary(packed))


def matchers_of(constraint: Constraint, submits: list[Submit], compiler: "Compiler") -> list[Matcher]:
    """One matcher for each; ValueError if the constraint cannot be compiled, or a resumed answer breaks it."""
    compiled = compiler.compile(constraint)
    matchers = [Matcher(compiled.deep_copy(), compiler.vocabulary) for _ in submits]
    for submit, matcher in zip(submits, matchers, strict=True):
        if not matcher.follow(unpack_ids(submit.output)):
            raise ValueError("resume_token_ids has a token that the constraint does not allow; send it unchanged")
    return matchers
