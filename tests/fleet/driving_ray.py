"""Hosts on a Ray of its own: what is told to do it says on stdout, a line of JSON for each thing that it heard.

A process of its own, started with `local_environment`: Ray reads it when it is imported, and leaves much behind.
"""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import ray
from ray._private import state

from fleet.control.hosts import Host, HostGone, HostLost, Hosts
from fleet.on_ray.cleanup import lead_a_session, processes, watch_over
from fleet.on_ray.hosts import Patience, RayHosts
from fleet.on_ray.launch import init
from fleet.plan import ModelPlan, Resources, Task
from tests.processes import of_process

PATIENCE = Patience(report_s=0.5, silent_s=2.0)
WITHIN_S = 80.0
HEAR_FOR_S = 3.0


def task(name: str, **resources: float) -> Task:
    plan = ModelPlan(name="sim", model="demo", engine="simulated", resources=Resources(**resources))  # type: ignore[arg-type]
    return Task(name=name, plan=plan)


def say(**heard: object) -> None:
    print(json.dumps(heard), flush=True)


async def hear(host: Host, for_s: float, until: str | None = None) -> None:
    """Its reports, or why there are none, each once; `until` is a life, or the beginning of a reason."""
    end_s, after = time.monotonic() + for_s, None
    before: dict[str, str] = {}
    while time.monotonic() < end_s and not (until and any(each.startswith(until) for each in before.values())):
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + end_s - time.monotonic()):
                report = await host.report(after)
        except TimeoutError:
            return
        except (HostLost, HostGone) as error:
            heard = {"error": type(error).__name__, "why": str(error)}
            await asyncio.sleep(0.1)
        else:
            after, heard = (report.host, report.version), {"life": report.life}
        if heard != before:
            say(**heard)
        before = heard


def stop_actor() -> None:
    """As a process that hangs: it lives, and does nothing."""
    ours = [each.pid for each in processes() if each.session == os.getsid(0)]
    [pid] = [each for each in ours if b"ray::Replica" in of_process(each, "cmdline")]
    os.kill(pid, signal.SIGSTOP)


def made_of(name: str) -> int:
    return sum(each["Name"] == name for each in state.actors().values())


async def hangs(made: Hosts) -> None:
    await hear(RayHosts("hangs").begin(task("sim-0")), WITHIN_S, until="ready")
    stop_actor()
    await hear(made.begin(task("sim-0")), WITHIN_S, until="ready")


async def cannot_begin(made: Hosts) -> None:
    host = made.begin(task("no/file"))
    await hear(host, WITHIN_S, until="its actor cannot begin")
    await hear(host, HEAR_FOR_S)
    say(actors=made_of("no/file"))
    await host.stop(0.0)
    say(there=await made.there())


async def dies_unheard(_: Hosts) -> None:
    """Its output is not awaited, so it is dead before its death is known."""
    host = RayHosts("dies_unheard", Patience(report_s=0.0, silent_s=60.0)).begin(task("no/file"))
    await hear(host, WITHIN_S, until="its actor cannot begin")
    await host.stop(0.0)


async def has_no_place(made: Hosts) -> None:
    host = made.begin(task("sim-0", gpus=3.0))
    await hear(host, 1.0)
    say(missing=await made.missing(task("sim-0", gpus=3.0)))
    await host.stop(0.0)
    say(there=await made.there())
    await hear(host, 0.5)


async def is_refused(made: Hosts) -> None:
    await hear(made.begin(task("sim-0", gpus=1.5)), 0.5)


def main(folder: str, act: str) -> None:
    watch_over(lead_a_session())
    init(Path(folder))
    acts = {each.__name__: each for each in (hangs, cannot_begin, dies_unheard, has_no_place, is_refused)}
    try:
        for name in act.split(","):
            say(act=name)
            asyncio.run(acts[name](RayHosts(name, PATIENCE)))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
