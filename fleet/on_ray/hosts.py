"""Hosts as Ray's actors: Ray places and restarts them, and they outlive the controller."""

import asyncio
import time
from typing import Any, NamedTuple

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from fleet.control.hosts import Host, HostGone, HostLost
from fleet.host.report import Report
from fleet.host.supervisor import REPORT_WITHIN_S, STOP_LIMIT_S
from fleet.on_ray.cluster import DETACHED, UNPLACED, Actor, lacking, needs, nodes, state_of
from fleet.on_ray.replica import Replica, decode_report, encode_task
from fleet.plan import Task

GRACE_S = 3.0  # the time for an answer to come through Ray
SILENT_S = 60.0  # an actor that does not answer for this long, though Ray says that it lives, is killed
LOG_WITHIN_S = 10.0
GONE_WITHIN_S = 5.0
LOOK_S = 0.02
FIRST_PAUSE_S = 1.0  # before an actor that could not be made is made again
LONGEST_PAUSE_S = 30.0


class Patience(NamedTuple):
    report_s: float = REPORT_WITHIN_S + GRACE_S
    silent_s: float = SILENT_S


class RayHosts:
    """`namespace` is Ray's, for this fleet alone."""

    def __init__(self, namespace: str, patience: Patience = Patience()) -> None:  # noqa: B008
        self._namespace = namespace
        self._patience = patience

    def begin(self, task: Task) -> Host:
        return RayHost(task, self._namespace, self._patience)

    async def there(self) -> list[str]:
        named = await asyncio.to_thread(ray.util.list_named_actors, all_namespaces=True)
        names = [each["name"] for each in named if each["namespace"] == self._namespace]
        return [name for name in names if await asyncio.to_thread(find, name, self._namespace) is not None]

    async def missing(self, task: Task) -> str | None:
        return await asyncio.to_thread(lambda: lacking(needs(task.plan.resources), nodes()))


def find(name: str, namespace: str) -> Actor | None:
    """Return a replica's actor; None for an actor of another program."""
    try:
        actor = ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None
    return actor if all(hasattr(actor, method) for method in ("report", "stop", "log")) else None


def find_or_make(task: Task, namespace: str) -> Actor:
    resources = task.plan.resources
    options: Any = ray.remote(Replica).options(
        **DETACHED,
        name=task.name,
        namespace=namespace,
        num_cpus=resources.cpus,
        num_gpus=resources.gpus,
        resources=resources.custom,
        scheduling_strategy="SPREAD",  # the fewer go at once when a node does
    )
    return options.remote(encode_task(task))


class RayHost:
    def __init__(self, task: Task, namespace: str, patience: Patience) -> None:
        self._task = task
        self._namespace = namespace
        self._patience = patience
        self._actor: Actor | None = None
        self._stopped = False
        self._making = asyncio.Lock()
        self._silent_since_s: float | None = None
        self._pause_s = FIRST_PAUSE_S

    # ---- reports

    async def report(self, after: tuple[str, int] | None) -> Report:
        actor = await self._there_or_made()
        while True:
            try:
                async with asyncio.timeout(self._patience.report_s):
                    said = decode_report(await actor.report.remote(after))
            except TimeoutError as error:
                await self._explain_silence(actor, error)
                continue
            except ActorDiedError as error:
                raise await self._death(error) from error
            except RayError as error:
                raise HostLost(unreachable(error)) from error
            self._silent_since_s, self._pause_s = None, FIRST_PAUSE_S
            return said

    async def _there_or_made(self) -> Actor:
        async with self._making:
            if self._actor is None:
                if self._stopped:
                    raise HostGone("it was stopped")
                try:
                    self._actor = await asyncio.to_thread(find_or_make, self._task, self._namespace)
                except (RayError, ValueError) as error:
                    raise HostLost(f"Ray does not take its actor: {first_line(error)}") from error
            return self._actor

    async def _death(self, error: ActorDiedError) -> HostGone | HostLost:
        """Return the error of a dead actor; wait before one that could not start is created again."""
        self._actor = None
        if not error.actor_init_failed:
            return HostGone(first_line(error))
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        return HostLost(f"its actor cannot begin: {last_line(error)}")

    async def _last_words(self, actor: Actor) -> HostGone | HostLost:
        """Return the error of a dead actor, which any call tells at once."""
        try:
            async with asyncio.timeout(GONE_WITHIN_S):
                await actor.report.remote(None)
        except ActorDiedError as error:
            return await self._death(error)
        except (TimeoutError, RayError):
            pass
        self._actor = None
        return HostGone("its actor is dead")

    async def _explain_silence(self, actor: Actor, error: TimeoutError) -> None:
        """Return at once if it has no node yet: it cannot report anything."""
        state = await asyncio.to_thread(state_of, actor)
        if state in UNPLACED:
            return
        if state == "DEAD":
            raise await self._last_words(actor) from error
        if state == "RESTARTING":
            self._silent_since_s = None
            why = await asyncio.to_thread(lambda: lacking(needs(self._task.plan.resources), nodes()))
            raise HostLost(f"Ray is to start its actor anew: {why or 'it takes a while'}") from error
        now_s = time.monotonic()
        if self._silent_since_s is None:
            self._silent_since_s = now_s - self._patience.report_s
        silent_s = now_s - self._silent_since_s
        if silent_s >= self._patience.silent_s:
            self._silent_since_s = None
            await asyncio.to_thread(ray.kill, actor, no_restart=False)
            raise HostLost(f"its actor was killed: it did not answer for {silent_s:.0f} s") from error
        raise HostLost(f"its actor does not answer for {silent_s:.0f} s") from error

    # ---- orders

    async def stop(self, limit_s: float) -> None:
        """Stop the replica and its actor; Ray kills one that cannot be reached as soon as it can."""
        self._stopped = True
        async with self._making:
            actor = self._actor or await asyncio.to_thread(find, self._task.name, self._namespace)
        if actor is None:
            return
        try:
            if await asyncio.to_thread(state_of, actor) == "ALIVE":
                async with asyncio.timeout(limit_s + STOP_LIMIT_S + GRACE_S):
                    await actor.stop.remote(limit_s)
        except (TimeoutError, RayError):
            pass
        await asyncio.to_thread(ray.kill, actor, no_restart=True)
        end_s = time.monotonic() + GONE_WITHIN_S
        while await asyncio.to_thread(state_of, actor) != "DEAD":  # then its name is free
            if time.monotonic() > end_s:
                raise HostLost("Ray has not killed its actor yet")
            await asyncio.sleep(LOOK_S)

    async def log(self, lines: int) -> str:
        actor = await self._there_or_made()
        try:
            async with asyncio.timeout(LOG_WITHIN_S):
                said: str = await actor.log.remote(lines)
                return said
        except TimeoutError as error:
            raise HostLost(f"its actor gave no answer within {LOG_WITHIN_S:g} s") from error
        except ActorDiedError as error:
            raise HostGone(first_line(error)) from error
        except RayError as error:
            raise HostLost(unreachable(error)) from error


def first_line(error: Exception) -> str:
    text = "".join(map(str, error.args)) if isinstance(error, ValueError) else str(error)  # Ray's own come in parts
    return text.strip().partition("\n")[0]


def unreachable(error: RayError) -> str:
    if not isinstance(error, ActorUnavailableError):
        return last_line(error)
    reason = first_line(error).rpartition("IOError: ")[2].partition(". ")[0]  # the same words stand around it each time
    return f"Ray does not reach its actor: {reason}"


def last_line(error: Exception) -> str:
    """Return the exception of a remote traceback."""
    return str(error).strip().rpartition("\n")[2]
