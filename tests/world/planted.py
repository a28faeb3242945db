"""`python -m tests.world.planted [NAME]...`: plants bugs in the router, and tells how soon worlds find each.

Each has been a bug of the router once, or is the like of one: an interleaving. It is planted in the source of a module
as a fresh process imports it; no file changes. One that is not found shows what the worlds, or their auditor, lack.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from itertools import count
from types import CodeType
from typing import Any, NamedTuple

import click


class Bug(NamedTuple):
    name: str
    what: str
    module: str
    old: str
    new: str


BUGS = (
    Bug(
        "old-health-check",
        "A health check that was sent before a replica said that it drains brings it back.",
        "router.members.health",
        "            if not self._rests_since_probe:\n                self.resting = None\n",
        "            self.resting = None\n",
    ),
    Bug(
        "begun-refused",
        "With a full queue a begun answer that comes at the same moment as a new request is refused.",
        "router.placement.waiting",
        "rank > worst or (rank == worst and (came_s >= now_s or last < 0 < number))",
        "rank >= worst",
    ),
    Bug(
        "begun-displaced",
        "With a full queue a begun answer makes way for a request of the same moment that waits again.",
        "router.placement.waiting",
        "next(self._numbers) * (-1 if begun else 1)",
        "next(self._numbers)",
    ),
    Bug(
        "full-breaks-off",
        "Half an answer breaks off where the only replica that could go on is full at that moment.",
        "router.proxy.flow",
        "not (waits or self.port.others())",
        "not self.port.others()",
    ),
    Bug(
        "lost-before-its-head",
        "An answer breaks off if the replica that took it over is lost before its first token.",
        "router.proxy.progress",
        "if attempt.framed or not attempt.status:",
        "if attempt.framed:",
    ),
    Bug(
        "ghost-in-the-queue",
        "A client that leaves while its request waits for room leaves it in the queue.",
        "router.proxy.request",
        "        if flow.since_s:\n            self.router.waiting.cancel(self)\n",
        "",
    ),
    Bug(
        "works-for-nobody",
        "A client that leaves does not end its request at the replica.",
        "router.proxy.request",
        "            self.attempt.cancel()\n            self.end_attempt()\n",
        "            self.end_attempt()\n",
    ),
    Bug(
        "dying-machine",
        "A request that has lost two replicas of a dying machine is sent to the third at once.",
        "router.proxy.flow",
        'if self._lost == MAX_LOST - 1 and row.retries == "three":',
        "if False:",
    ),
    Bug(
        "sent-again",
        "A request is sent again on another connection although its answer has begun.",
        "router.members.upstream",
        "connection.reused and not connection.spoken and",
        "connection.reused and",
    ),
    Bug(
        "two-beginnings",
        "The beginning of a whole answer is kept when another replica repeats it.",
        "router.proxy.answer",
        "            self.kept.take()  # another replica repeats it\n",
        "            pass\n",
    ),
    Bug(
        "lost-tail",
        "The last batch of events is lost, and nobody asks for it.",
        "events.stream.native_stream",
        "if self._behind_since_s is not None and now_s - self._behind_since_s >= self.config.behind_grace_s:",
        "if False:",
    ),
    Bug(
        "blocks-of-the-dead",
        "Blocks of a replica's last process stay in the index.",
        "events.stream.native_stream",
        '[Reset("snapshot"), *[Partial',
        "[*[Partial",
    ),
    Bug(
        "salt-lost-on-the-way",
        "A request that goes on at another replica has lost its tenant's salt.",
        "router.proxy.progress",
        "cache_salt=prompt.salt,",
        "cache_salt=None if resumed else prompt.salt,",
    ),
    Bug(
        "refused-and-charged",
        "A prompt that is refused for its key's limit of tokens counts as a request of the day.",
        "router.tenants.charges",
        "                self._add(state, NOTHING.less(self.charged), now_s, wall_s)\n",
        "",
    ),
    Bug(
        "charged-by-the-second",
        "A continued answer is charged by the hit at the replica that goes on with it.",
        "router.proxy.answer",
        "attempt.cached_tokens is not None and not flow.resumes:",
        "attempt.cached_tokens is not None:",
    ),
    Bug(
        "ended-after-a-restart",
        "A request from before a replica's restart is counted off once more when it ends.",
        "router.placement.load",
        "        if one is None:\n            return\n        if one.queued:\n",
        "        if one is None:\n            self.candidate.in_flight -= 1\n"
        "            return\n        if one.queued:\n",
    ),
    Bug(
        "stays-in-flight",
        "A request that has used nothing stays in the count of its key's running requests.",
        "router.tenants.charges",
        "            account.shared.ended_one(account.key.name)\n            return\n",
        "            return\n",
    ),
    Bug(
        "two-effects",
        "A request whose effects are unknown is sent again when a reused connection ends.",
        "router.proxy.request",
        'self.type_line, self.exchange.scope["method"] in SAFE',
        "self.type_line, True",
    ),
    Bug(
        "given-up-is-complete",
        "A stream that vLLM gives up passes as a complete one.",
        "router.proxy.answer",
        "and (before := events.before_abort(body)) is not None:",
        "and (before := None) is not None:",
    ),
    Bug(
        "stuck-stream",
        "A stream waits on a connection that has died in a silence, though its replica is heard again.",
        "router.core",
        "return attempt.touched_s < server.recovered_s and (attempt.goes_on or sent_into_silence)",
        "return False",
    ),
    Bug(
        "pod-stays",
        "A pod that was deleted stays a replica until the next list.",
        "router.members.discovery.collection",
        'event.type == "DELETED"',
        "not event.type",
    ),
)


MAX_SHOWN = 120  # characters of what was found


class _Loader(SourceFileLoader):
    bug: Bug

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002
        source = self.get_data(self.path).decode()
        if source.count(self.bug.old) != 1:
            raise SystemExit(f"{self.bug.name}: {self.path} has {source.count(self.bug.old)} times:\n{self.bug.old}")
        return self.source_to_code(source.replace(self.bug.old, self.bug.new).encode(), self.path)


class _Finder(PathFinder):
    """Finds one module with its bug."""

    def __init__(self, bug: Bug) -> None:
        self._bug = bug

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:  # type: ignore[override]
        if fullname != self._bug.module:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        assert spec is not None and spec.origin is not None, f"there is no {fullname}"
        loader = spec.loader = _Loader(fullname, spec.origin)
        loader.bug = self._bug
        return spec


def plant(bug: Bug) -> None:
    assert bug.module not in sys.modules, f"{bug.module} is imported already"
    sys.meta_path.insert(0, _Finder(bug))


def hunt(bug: Bug, first: int, seconds: float) -> str:
    """Plant it in this process; return a line of the table."""
    plant(bug)
    from tests.world.world import World

    began_s = time.process_time()
    for tried in count(1):
        failures = World(first + tried - 1).run().audit.failures
        took_s = time.process_time() - began_s
        if failures or took_s > seconds:
            break
    found = f"{tried} | {took_s:.0f} s | {failures[0]}" if failures else f"not in {tried} | {took_s:.0f} s | "
    return f"| `{bug.name}` | {bug.what} | {found[:MAX_SHOWN]} |"


@click.command()
@click.argument("names", nargs=-1)
@click.option("--first", default=1_000, show_default=True, help="The first seed.")
@click.option("--seconds", default=120.0, show_default=True, help="Look for each for so long, by the processor's time.")
@click.option("--here", is_flag=True, hidden=True)
def main(names: Sequence[str], first: int, seconds: float, here: bool) -> None:
    """Print a row for each bug, or for those of these names; exit with 1 if one is not found."""
    by_name = {bug.name: bug for bug in BUGS}
    if here:
        print(hunt(by_name[names[0]], first, seconds))
        return
    lines = []
    for name in names or by_name:
        command = [sys.executable, "-m", "tests.world.planted", name, "--first", str(first), "--seconds", str(seconds)]
        line = subprocess.run([*command, "--here"], stdout=subprocess.PIPE, text=True, check=True).stdout
        print(line, end="", flush=True)
        lines.append(line)
    sys.exit(any("| not in" in line for line in lines))


if __name__ == "__main__":
    main()
