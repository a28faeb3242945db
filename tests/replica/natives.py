"""Native replicas as users run them: `warmroute replica --model FOLDER`, in processes of their own."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from replica.cli import replica
from replica.model.demo import CACHE_VARIABLE
from tests.events.processes import DEADLINE_S, wait_until
from tests.replica.serving import MODEL, Replica, running

COMMAND = (sys.executable, "-m", "fleet", "replica")
QUIET = ("--port", 0, "--no-events", "--log-level", "warning")
# Small, so that prompts come in chunks, and answers wait for each other.
SMALL = ("--served-model-name", "model", "--num-blocks", 256, "--max-num-batched-tokens", 64, "--max-num-seqs", 16)

Serving = Callable[..., Replica]


class Native(Replica):
    def __init__(self, model: Path | str, *options: object, **environment: str) -> None:
        self._start([*COMMAND, *map(str, ("--model", model, *QUIET, *options))], **environment)

    def check(self) -> None:
        """Has the engine verify every invariant."""
        passed = self._said("check passed")
        os.kill(self.engine_pid, signal.SIGUSR1)
        wait_until(lambda: self._said("check passed") > passed, "the engine's invariants hold")

    def _said(self, text: str) -> int:
        return "".join(self.err).count(text)


def native(model: Path | str, *options: object, **environment: str) -> AbstractContextManager[Native]:
    return running(Native(model, *options, **environment))


@contextmanager
def natives(folder_of: Callable[[str], Path]) -> Iterator[Serving]:
    """Replicas of models by their names, with options beyond SMALL; each is started when it is first asked for."""
    with ExitStack() as stack:

        @cache
        def started(name: str, *options: object) -> Replica:
            return stack.enter_context(native(folder_of(name), *SMALL, *options))

        yield started


def demo(cache: Path) -> AbstractContextManager[Native]:
    """A replica of the demo model, whose files are in this cache."""
    return native(MODEL, "--kv-cache-gb", 0.1, "--max-num-batched-tokens", 256, **{CACHE_VARIABLE: str(cache)})


def refused(*options: object, **environment: str) -> tuple[int, str]:
    """The exit status and stderr of a replica whose settings cannot be used, without a process of its own."""
    ended = CliRunner().invoke(replica, [*map(str, (*QUIET, *options))], env=environment)
    assert not ended.stdout
    return ended.exit_code, ended.stderr


def failed(*options: object) -> tuple[int, str]:
    """The exit status and stderr of a replica whose engine cannot start."""
    command = [*COMMAND, *map(str, (*QUIET, *options))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert not ended.stdout
    return ended.returncode, ended.stderr


def completion(prompt: Sequence[object], **fields: Any) -> dict[str, Any]:
    """A request for greedy tokens, said as ids."""
    greedy = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    return {"model": "model", "prompt": prompt, **greedy, **fields}


def ask(served: Replica, prompt: Sequence[object], **fields: Any) -> Any:
    """The whole answer."""
    answer = served.post("/v1/completions", completion(prompt, **fields))
    assert answer.status == 200, answer.body
    return answer.json


def tokens(served: Replica, prompt: Sequence[int], **fields: Any) -> list[int]:
    """The token ids of the only choice."""
    [choice] = ask(served, prompt, **fields)["choices"]
    generated: list[int] = choice["token_ids"]
    return generated
