"""Keeps one replica's process running, looks whether it works, and reports all of it."""

import asyncio
import os
import sys
import time
import uuid
from contextlib import suppress
from typing import Any

import httpx2
import msgspec
from msgspec import Struct

from engines import profile_of
from engines.metrics import scraped_queues
from events.native import Load
from fleet.host.child import Child, Log
from fleet.host.engines import Launch, engine_missing, launch
from fleet.host.report import ReplicaAddress, Report
from fleet.plan import FOREIGN, Task
from router.console.asking import options

TIMEOUT_S = 2.0  # a replica that works answers within milliseconds


class _Pool(Struct, frozen=True):
    total: int = 0


class _Rates(Struct, frozen=True):
    token_hit_rate: float = 0.0
    prompt_tokens_per_s: float = 0.0
    generated_tokens_per_s: float = 0.0
    token_s: float = 0.0


class _LoadResponse(Struct):
    """The part of our replicas' GET /load that is used here."""

    ready: bool
    load: Load
    pool: _Pool = _Pool()
    rates: _Rates = _Rates()
    open_requests: int = 0
    block_size: int = 0
    kv_read: str = ""


_decode = msgspec.json.Decoder(_LoadResponse).decode


class Probe:
    """Asks a replica whether it works, and how much it has to do."""

    def __init__(self, place: ReplicaAddress, key: str | None) -> None:
        self._place = place
        self._http = httpx2.AsyncClient(base_url=place.url, **options(key or None, TIMEOUT_S))

    async def look(self) -> dict[str, Any] | None:
        """Return the measured fields of a Report; None without a good answer in time."""
        try:
            profile = profile_of(self._place.engine)
            if profile.describes_itself:
                answer = _decode(await self._get("/load"))
                if not answer.ready:
                    return None
                return {
                    "load": answer.load,
                    "hit_rate": answer.rates.token_hit_rate,
                    "prompt_tokens_per_s": answer.rates.prompt_tokens_per_s,
                    "generated_tokens_per_s": answer.rates.generated_tokens_per_s,
                    "token_s": answer.rates.token_s,
                    "open_requests": answer.open_requests,
                    "total_blocks": answer.pool.total,
                    "block_size": answer.block_size,
                    "kv_read": answer.kv_read,
                    "measured_at": time.time(),
                }
            await self._get(profile.health_path)
            queue = scraped_queues(await self._get("/metrics"), profile.metrics).get(None)
        except (httpx2.HTTPError, msgspec.MsgspecError, UnicodeDecodeError):
            return None
        running, waiting = queue or (0, 0)
        load = Load(running=running, waiting=waiting)
        return {"load": load, "open_requests": running + waiting, "measured_at": time.time()}

    async def _get(self, path: str) -> bytes:
        answer = await self._http.get(path)
        answer.raise_for_status()
        return answer.content

    async def close(self) -> None:
        await self._http.aclose()


FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
SETTLED_S = 60.0  # a process that ran for this long is restarted at once
LOOK_S = 1.0  # between probes
STARTING_LOOK_S = 0.1
STOP_LIMIT_S = 20.0  # a process whose requests are done is killed after this
REPORT_WITHIN_S = 10.0  # a long poll without news is answered after this long


class Supervisor:
    """`run` it; `stop` ends the replica and with it `run`. `address` is the node's own, to listen on."""

    def __init__(self, task: Task, address: str, log: Log) -> None:
        self.task = task
        self._address = address
        self._log = log
        self._report = Report(
            name=task.name, host=uuid.uuid4().hex[:12], since=time.time(), node=address, log=str(log.path)
        )
        self._changed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._child: Child | None = None
        self._killed_for = ""  # why it was killed by us

    # ---- answers

    async def report(self, after: tuple[str, int] | None = None) -> Report:
        """Return the report; if it is still `after` (host, version), wait for a change for some seconds."""
        if after == (self._report.host, self._report.version):
            changed = self._changed
            with suppress(TimeoutError):
                async with asyncio.timeout(REPORT_WITHIN_S):
                    await changed.wait()
        return self._report

    async def stop(self, limit_s: float) -> bool:
        """Drain, end the process, and end `run`; False if it had to be killed."""
        self._stopping.set()
        child, ended = self._child, True
        if child is not None and not child.is_over:
            if self._report.place is not None:
                self._say(life="draining")
            if self.task.plan.engine in FOREIGN:
                # It would cut running requests. If it hangs, it is not measured; if it crashes, there are none left.
                begun_s = time.monotonic()
                version = self._report.version  # a measurement counts that is from after the routers were told
                while self._report.place is not None and not child.is_over and time.monotonic() - begun_s < limit_s:
                    if self._report.version != version and not self._report.open_requests:
                        break
                    await asyncio.sleep(STARTING_LOOK_S)
                limit_s -= time.monotonic() - begun_s
            ended = await child.stop(max(limit_s, 0.0) + STOP_LIMIT_S)
        self._say(life="ended", place=None, pid=None)
        return ended

    def kill(self) -> None:
        self._stopping.set()
        if self._child is not None:
            self._child.kill()

    # ---- its life

    async def run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._stopping.is_set():
            begun_s = time.monotonic()
            why = await self._live_once()
            if self._stopping.is_set():
                return
            if time.monotonic() - begun_s > SETTLED_S:
                pause_s = FIRST_PAUSE_S
            last_words = tuple(self._child.last_lines()) if self._child else ()
            self._say(life="failing", why=why, place=None, pid=None, last_words=last_words)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _live_once(self) -> str:
        """Run one process to its end; return how it ended, or why it could not start."""
        self._killed_for = ""
        try:
            if (missing := engine_missing(self.task.plan, self._address)) is not None:
                return missing
            start = launch(self.task, self._address, incarnation=uuid.uuid4().hex[:12])
            child = await Child.start(bound(start.command, self.task), self._log, start.environment)
        except (OSError, ValueError) as error:  # the moment is bad, or the plan: it is tried again in both cases
            return f"cannot be started: {error}"
        self._child = child
        self._say(life="starting", pid=child.pid, starts=self._report.starts + 1)
        if self._stopping.is_set():  # `stop` looked for a process before there was one
            child.kill()
        watching = asyncio.create_task(self._watch(child, start))
        watching.add_done_callback(self._watched)
        try:
            ending = await child.ended()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        return self._killed_for or ending

    def _watched(self, watching: "asyncio.Task[None]") -> None:
        """Kill a replica that cannot be probed, as with a key that fits into no header."""
        if not watching.cancelled() and (error := watching.exception()) is not None:
            self._replace(f"cannot be watched: {error}")

    def _replace(self, why: str) -> None:
        """Kill the process; `run` starts another one."""
        if self._child is not None:
            self._killed_for = why
            self._child.kill()

    async def _watch(self, child: Child, start: Launch) -> None:
        """Wait until it is ready, then see that it stays so."""
        place = start.place
        while place is None:
            await asyncio.sleep(STARTING_LOOK_S)
            place = child.place()
        place = msgspec.structs.replace(place, incarnation=place.incarnation or uuid.uuid4().hex[:12])
        name = self.task.plan.api_key_env or "WARMROUTE_API_KEY"
        probe = Probe(place, self.task.plan.environment.get(name) or os.environ.get(name))
        try:
            while (measured := await probe.look()) is None:
                await asyncio.sleep(STARTING_LOOK_S)
            self._say(life="ready", why="", place=place, notes=tuple(child.notes()), **measured)
            silent_s = 0.0  # time in which this process stood still itself is not counted
            while True:
                begun_s = time.monotonic()
                await asyncio.sleep(LOOK_S)
                self._log.shorten()
                measured = await probe.look()
                if measured is not None:
                    silent_s = 0.0
                    self._say(**measured)
                    continue
                silent_s += min(time.monotonic() - begun_s, LOOK_S + TIMEOUT_S)
                if silent_s >= self.task.plan.wedged_after_s and not self._stopping.is_set():
                    self._replace(f"was killed: it gave no sign of life for {silent_s:.0f} s")
                    return
        finally:
            await probe.close()

    def _say(self, **changed: Any) -> None:
        if changed.get("life", self._report.life) != self._report.life:
            changed["since"] = time.time()
        self._report = msgspec.structs.replace(self._report, version=self._report.version + 1, **changed)
        self._changed.set()
        self._changed = asyncio.Event()


def bound(command: tuple[str, ...], task: Task) -> list[str]:
    """Make a foreign engine end with its parent, as our own replicas do."""
    if task.plan.engine in FOREIGN:
        return [sys.executable, "-P", "-m", "fleet.host.bound", *command]
    return list(command)
