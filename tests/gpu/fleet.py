"""Two replicas on one device behind a router: where conversations go on, and what a crash changes for them."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tests.gpu.place import Place
from tests.gpu.report import Table
from tests.gpu.serving import TEXT, Served, asked, cached_tokens, ready, replica, save, started, whole

TITLE = "a router before two replicas of a Qwen3-0.6B with random weights, on one GPU"
USERS, TURNS, TURN_CHARACTERS = 8, 4, 2000  # a byte is a token
BLOCK = 16
WARM_UP = 30  # prompts
SHARE = "0.35"  # of the GPU's memory, for each


class Turn(NamedTuple):
    replica: str
    prompt: int  # tokens
    cached: int
    seconds: float


class Talk:
    """A conversation: each prompt begins with the one before."""

    def __init__(self, router: Served, user: int, characters: int) -> None:
        self._router = router
        self._text = f"{user} has a story to tell. "
        self._more = (f"And {user} went on, and on, and on. " * characters)[:characters]
        self.turns: list[Turn] = []

    @property
    def known(self) -> int:
        """Tokens of the last prompt that fill blocks."""
        return self.turns[-1].prompt // BLOCK * BLOCK

    def go_on(self) -> Turn:
        self._text += self._more
        body = {"model": "model", "prompt": self._text, "max_tokens": 1, "temperature": 0}
        began_s = time.perf_counter()
        answer = asked(self._router, "POST", "/v1/completions", body)
        taken_s = time.perf_counter() - began_s
        if answer.status != 200:
            raise RuntimeError(f"the router says {answer.status}: {answer.body[:500]!r}")
        content = json.loads(answer.body)
        prompt = content["usage"]["prompt_tokens"]
        self.turns.append(Turn(answer.replica, prompt, cached_tokens(content), taken_s))
        return self.turns[-1]


def run(place: Place, table: Table) -> None:
    with TemporaryDirectory() as folder, ExitStack() as stack:
        model = str(save(place, Path(folder) / "qwen3"))
        replicas = {}
        for name in "ab":
            log = Path(folder) / f"{name}.log"
            replicas[name] = stack.enter_context(replica(place, model, log, "--gpu-memory-utilization", SHARE))
            warm_up(replicas[name], place.size(WARM_UP, 1))
        log = Path(folder) / "router.log"
        named = [f"--replica=name={name},url=http://127.0.0.1:{one.port}" for name, one in replicas.items()]
        router = ready(stack.enter_context(started(log, "router", *named)), log, "router on ")
        talks = [Talk(router, user, place.size(TURN_CHARACTERS, 100)) for user in range(place.size(USERS, 4))]
        follow(place, table, talks, place.size(TURNS, 2))
        crash(table, talks, replicas)


def warm_up(served: Served, prompts: int) -> None:
    """The first steps are slow, and a replica says how fast its steps are: the router believes it."""
    for number in range(prompts):
        whole(served, "/v1/completions", {"model": "model", "prompt": f"{number}. {TEXT}" * 5, "max_tokens": 1})


def follow(place: Place, table: Table, talks: list[Talk], turns: int) -> None:
    """All begin at the same time; then each goes on in turn, so that events have time to come.

    On a busy CPU the router may rightly choose otherwise.
    """
    with ThreadPoolExecutor(len(talks)) as threads:
        first = list(threads.map(Talk.go_on, talks))
    used = {turn.replica for turn in first}
    table.check(
        "conversations begin on", len(used) == 2 or not place.is_gpu, f"replicas {' and '.join(sorted(used))}", "both"
    )
    cold = []
    for _ in range(1, turns):
        for number, talk in enumerate(talks):
            known, before, turn = talk.known, talk.turns[-1].replica, talk.go_on()
            if turn.cached < known:
                cold.append(f"user {number} {before} {turn.replica} {turn.cached} of {known}")
    went_on = len(talks) * (turns - 1)
    measured = f"{went_on - len(cold)} of {went_on}" + "".join(f"; {one}" for one in cold)
    table.check("turns that found all of the turn before cached", not (cold and place.is_gpu), measured, "all")
    table.figure("the last turn", [talk.turns[-1].seconds * 1000 for talk in talks], "ms", f"{talks[0].known:,} tokens")


def crash(table: Table, talks: list[Talk], replicas: dict[str, Served]) -> None:
    """Kill one replica at once; its conversations go on, and find their own turns again on the other."""
    gone = talks[0].turns[-1].replica
    left = next(name for name in replicas if name != gone)
    replicas[gone].process.kill()
    after = [talk.go_on() for talk in talks]
    answered = sum(turn.replica == left for turn in after)
    table.check("answered after kill -9 of one", answered == len(talks), f"{answered} by the other", f"{len(talks)}")
    moved = [turn.seconds * 1000 for talk, turn in zip(talks, after, strict=True) if talk.turns[-2].replica == gone]
    table.figure("a turn of the killed one's conversations", moved, "ms")
    known = [talk.known for talk in talks]
    warm = sum(talk.go_on().cached >= before for talk, before in zip(talks, known, strict=True))
    table.check("turns after that with all cached", warm == len(talks), f"{warm} of {len(talks)}", "all")
