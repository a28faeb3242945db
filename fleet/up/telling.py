"""Tells people and other commands of a fleet that `warmroute up` starts."""

import json
import os
import shlex
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fleet.commands.addresses.local_fleets import LocalFleet, process_started, record_fleet, remove_record
from fleet.control.reconcile import first_count
from fleet.control.record import View
from fleet.display import Display
from fleet.on_ray.orders import Launched
from fleet.output import say
from fleet.plan import FleetPlan
from fleet.up.planning import FLEET_KEY, KEY, Settings
from replica.model.locate import DEMO, SMOLLM2

EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # listened at, but asked at one

QUESTION = "Name the capital of France."
SIMULATED = (
    "The engine is simulated: its text is made up and its time is a clock's,",
    "but batching, caching and the events about it are real.",
)
OF_MODELS = {
    DEMO: (
        "The demo model is small and was never trained, so it babbles; the engine,",
        "cache and server are those of every model.",
    ),
    SMOLLM2: (
        "smollm2 is SmolLM2-135M-Instruct: small enough for any machine, so it answers",
        "simple questions, and is often wrong about others.",
    ),
}


@dataclass
class Telling:
    plan: FleetPlan
    settings: Settings
    listener: socket.socket | None  # the router's; None: none runs here
    folder: Path
    key: str  # the controller's
    display: Display | None  # None: without a terminal, or no longer
    after: ExitStack
    controller: str = ""
    announced: bool = False

    def __post_init__(self) -> None:
        self.logs = str(self.folder)

    def say(self, text: str) -> None:
        """Print; once all is announced, with the time, as this may be read much later."""
        if self.announced:
            text = f"{time.strftime('%H:%M:%S')} {text}"
        say(text) if self.display is None else self.display.line(text)

    def show(self, view: View) -> None:
        """Show how many replicas are ready, while they start."""
        if self.display is not None:
            ready, wanted = (sum(getattr(model, key) for model in view.models) for key in ("ready", "wanted"))
            self.display.step(ready, wanted, f"{ready} of {wanted} replicas are ready")

    def launched(self, started: Launched, took_s: float) -> None:
        if self.settings.ray:
            self.say(f"Ray is ready after {took_s:.1f} s")
        self.logs = started.logs or self.logs
        self.controller = started.controller
        if self.listener is None:
            return
        local = LocalFleet(
            port=self.listener.getsockname()[1],
            pid=os.getpid(),
            started=process_started(os.getpid()) or 0,
            controller=started.controller,
            key=self.key if FLEET_KEY in os.environ or not started.found else None,  # a found fleet has its own
            found=started.found,
            folders=() if self.settings.log_dir else (str(self.folder),),
            router=url_here(self.listener),
        )
        record_fleet(local)
        self.after.callback(partial(remove_record, local))

    def announce(self, view: View) -> None:
        if self.display is not None:
            self.display.close()
            self.display = None
        self.announced = True
        if self.listener is None:
            say(f"\n{replicas_of(self.plan)} of the cluster are ready; routers find them with\n")
            say(f"  warmroute router --registry {self.controller}\n")
            say(f"warmroute down {self.controller} ends them.")
            return
        url = f"http://{authority(*self.listener.getsockname()[:2])}"
        say(announcement(url, view, remarks_on(self.plan), guarded=KEY in os.environ))
        kept = "" if self.settings.log_dir else ",\nkept only if something fails"
        say(f"Logs: {self.logs}{kept}.")
        say("Elsewhere: warmroute status, scale, restart, logs. Ctrl-C ends everything.")


def replicas_of(plan: FleetPlan) -> str:
    counts = [(first_count(model), model.name) for model in plan.models]
    return ", ".join(f"{count} replica{'s' * (count != 1)} of {name}" for count, name in counts)


def url_here(listener: socket.socket) -> str:
    """Return a URL that clients on this machine can ask."""
    host, port = listener.getsockname()[:2]
    return f"http://{authority(EVERY_ADDRESS.get(host, host), port)}"


# ---- what runs where, and how to send a request


def remarks_on(plan: FleetPlan) -> Sequence[str]:
    if all(model.engine == "simulated" for model in plan.models):
        return SIMULATED
    return OF_MODELS.get(plan.models[0].name, ()) if len(plan.models) == 1 else ()


def announcement(url: str, view: View, remarks: Sequence[str], guarded: bool) -> str:
    """Lines that fit into 80 columns where host and model are short."""
    names = [model.name for model in view.models]
    who = [f"{model.ready} replica{'s' * (model.ready != 1)} of {model.name}" for model in view.models]
    listed = " and ".join([", ".join(who[:-1]), who[-1]] if len(who) > 1 else who)
    lines = ["", f"{listed} {'answer' if who[1:] or view.models[0].ready != 1 else 'answers'} at {url}"]
    lines += [f"and can be watched at {url}/dashboard", ""]
    for model in names:
        lines += [f"  {each.name}  {each.url}  events {each.events or 'off'}" for each in view.of(model)]
    lines += ["", *remarks] if remarks else []
    lines += ["", "Ask twice: the second answer comes from a warm cache (cached_tokens).", ""]
    served = view.models[0].serves or names[0]
    lines += [f"  {line}" for line in curl(served, url, guarded)]
    return "\n".join([*lines, ""])


def curl(model: str, url: str, guarded: bool) -> list[str]:
    body = (
        f'{{"model": {json.dumps(model)}, "max_tokens": 16,\n'
        f'     "messages": [{{"role": "user", "content":\n       "{QUESTION}"}}]}}'
    )
    key = ['  -H "Authorization: Bearer $WARMROUTE_API_KEY" \\'] if guarded else []
    return [
        f"curl {url}/v1/chat/completions \\",
        *key,
        "  -H 'Content-Type: application/json' \\",
        *f"  -d {shlex.quote(body)}".splitlines(),
    ]


def authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
