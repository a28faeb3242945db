"""The scenes of `warmroute demo`: questions about a document, and a replica that dies in the middle of an answer."""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.status import Status
from rich.text import Text

from api.process.lifeline import die_with_parent, module
from events.tool.words import printable
from fleet.commands.addresses.local_fleets import LocalFleet, recorded_fleets
from fleet.commands.client import FleetClient
from fleet.control.record import ReplicaView
from fleet.display import has_cursor
from fleet.host.child import LAST_LINES, Log
from lab.chat.answers import Answer, Page, Place, answered, rest
from lab.chat.conversation import TOO_LONG
from router.console.asking import Client
from router.console.formatting import duration, plain_console
from router.responses import DecisionList

GUIDE = files("router.dashboard") / "static" / "lighthouse.txt"  # a sample of the playground's, too
TASK = "Answer from this guide, in one sentence:"
QUESTIONS = ("How many steps does the tower have?", "Who designed the lighthouse?", "What was the goat called?")
LONG_QUESTION = "Describe the lighthouse."
ONE_SENTENCE = {"max_tokens": 48, "stop": ["."], "include_stop_str_in_output": True}
LONG = {"max_tokens": 96, "stop": ["\n\n"], "frequency_penalty": 0.6}  # or a small model repeats itself
LEAST_CHARACTERS = 2_000  # the guide has at least this many where a model's context is short
KILLED_AFTER = 60  # characters of the long answer
KILLABLE = ("smollm2", "demo")  # small models, whose replicas are back within seconds
BABBLES = "This model babbles: its answers mean nothing, but its tokens and times are real."


class Demonstration:
    """`fleet` runs on this machine, as this user; `kills`: a replica may be killed."""

    def __init__(self, place: Place, fleet: FleetClient, *, kills: bool) -> None:
        self._place = place
        self._kills = kills
        self._fleet = fleet
        self._console = plain_console(sys.stdout)
        self._salt = secrets.token_hex(8)  # nobody has asked with it, so nothing is cached, however often this runs
        self._guide = GUIDE.read_text()
        self._first_s: list[float] = []  # times to first token, the cold one first

    def run(self) -> None:
        click.echo(f"{self._place.model} at {self._place.target.url} is asked about a guide to a lighthouse.")
        if self._place.model == "demo":
            click.echo(BABBLES)
        for question in QUESTIONS:
            answer = self._ask(question, Page(self._clocks if has_cursor(self._console) else None), ONE_SENTENCE)
            first_s = answer.outcome.first_s or 0.0
            self._note(f"{self._clocks(first_s)}   {' · '.join(rest(answer))}")
            self._first_s.append(first_s)
        lost = self._lose_replica()
        cold_s, *warm_s = self._first_s
        click.echo(f"\nTime to first token: {duration(cold_s)} cold, {' and '.join(map(duration, warm_s))} warm.")
        click.echo(lost)

    def _ask(self, question: str, page: Page, length: dict[str, Any]) -> Answer:
        click.echo(f"\n> {question}")
        while True:
            messages = [
                {"role": "system", "content": f"{TASK}\n\n{self._guide}"},
                {"role": "user", "content": question},
            ]
            try:
                answer = answered(self._place, messages, page.frame, temperature=0, cache_salt=self._salt, **length)
            finally:
                page.end()
            if answer.stopped:
                raise KeyboardInterrupt
            if (error := answer.outcome.error) is None:
                return answer
            if answer.outcome.status not in TOO_LONG or len(self._guide) < LEAST_CHARACTERS:
                raise click.ClickException(f"{self._place.target.url}: {error}: {printable(answer.outcome.detail)}")
            self._guide = self._guide[: len(self._guide) // 2]
            self._note("The guide is longer than the model's context; half of it is asked about.")

    def _clocks(self, seconds: float) -> str:
        """The time to the first token side by side: of the cold question, and of this one."""
        if not self._first_s:
            return f"cold {seconds:5.2f} s"
        return f"cold {self._first_s[0]:5.2f} s   warm {seconds:5.2f} s"

    def _note(self, text: str) -> None:
        self._console.print(Text(text, "dim"), soft_wrap=True)

    def _lose_replica(self) -> str:
        """Kill the replica that answers, in the middle of its answer; say what became of that."""
        if not self._kills:
            return "No replica was killed."
        view = self._fleet.view()
        page = KillingPage({replica.name: replica for replica in view.replicas if replica.model in KILLABLE})
        self._ask(LONG_QUESTION, page, LONG)
        if page.killed is None:
            return f"No replica was killed: only those of {' and '.join(KILLABLE)} are, while they answer."
        heir = "another one"
        # The router may tell who ended the answer; its headers name the replica that began it.
        with suppress(click.ClickException), Client(self._place.target.url, self._place.key) as router:
            [last] = router.get("/decisions?limit=1", DecisionList).decisions
            heir = printable(last.chosen or heir)
        killed, gap = page.killed, duration(page.gap_s)
        return f"{killed} was killed in the middle of an answer, and {heir} went on in the same stream {gap} later."


class KillingPage(Page):
    """Kills the replica that answers once there is some text, and measures for how long nothing follows."""

    def __init__(self, replicas: dict[str, ReplicaView]) -> None:
        super().__init__()
        self.killed: str | None = None
        self.gap_s = 0.0
        self._replicas = replicas
        self._killed_s = 0.0
        self._is_told = False

    def frame(self, answer: Answer, text: str, seconds: float) -> None:
        super().frame(answer, text, seconds)
        if self.killed is None:
            replica = self._replicas.get(answer.outcome.replica or "")
            if replica is not None and len(answer.text) >= KILLED_AFTER:
                kill(replica)
                self.killed, self._killed_s = replica.name, seconds
        elif not self._is_told:  # one look later, as some text was still on its way
            self._is_told = True
            self.end()
            self.has_text = False
            click.echo(f"{self.killed} is killed (SIGKILL, process {self._replicas[self.killed].pid})")
            if has_cursor(Console()):
                self.clock = lambda now_s: f"{now_s - self._killed_s:.2f} s"
        elif text and not self.gap_s:
            self.gap_s = seconds - self._killed_s


def kill(replica: ReplicaView) -> None:
    """End a replica as a crash would; a click error for a process that is not it, or another user's."""
    try:
        process = os.pidfd_open(replica.pid or 0)  # another process may have the number by the time of the signal
        try:
            folder = Path(f"/proc/{replica.pid}")
            is_it = replica.name.encode() in (folder / "cmdline").read_bytes().split(b"\0")
            if not is_it or folder.stat().st_uid != os.geteuid():
                raise click.ClickException(
                    f"process {replica.pid} is not {replica.name}, or not yours; it is left alone"
                )
            signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)
    except OSError as error:
        raise click.ClickException(f"cannot kill {replica.name}: {error}") from error


LOOK_S = 0.05
READY = "Ctrl-C ends everything."  # the last words of `warmroute up`, once all can be asked


@contextmanager
def own_fleet() -> Iterator[LocalFleet]:
    """Run two replicas and a router; a click error, with what `warmroute up` has said, if they cannot start."""
    parent = os.getpid()
    # A folder for logs: `up` would keep its own after a kill.
    with tempfile.TemporaryDirectory() as folder, closing(Log(Path(folder, "up.log"))) as log:
        process = subprocess.Popen(
            module("fleet", "up", "--no-ray", "--port", "0", "--log-dir", folder),
            stdin=subprocess.DEVNULL,
            stdout=log.descriptor,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in a terminal is for this process, which ends the fleet in order
            preexec_fn=lambda: die_with_parent(parent),
        )
        try:
            with Status("Starting two replicas and a router", console=Console(stderr=True)):
                while READY not in (said := log.tail(0)):
                    if process.poll() is not None:
                        last = "\n".join(said.splitlines()[-LAST_LINES:])
                        raise click.ClickException(f"`warmroute up` cannot start a fleet to show:\n{last}")
                    time.sleep(LOOK_S)
            [fleet] = [fleet for fleet in recorded_fleets() if fleet.pid == process.pid]
            yield fleet
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait()
            except KeyboardInterrupt:  # a second one does not wait
                process.kill()
                process.wait()
