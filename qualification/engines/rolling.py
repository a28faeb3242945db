"""Print what clients of all four APIs notice of engines that end, sleep and stop.

Several vLLM behind a router, with `resume`. Clients ask greedily, streamed and whole, and compare each text with that
of an engine which nobody disturbs. Meanwhile each engine gets SIGTERM and is started again, one sleeps, and one has a
stopped EngineCore.
"""

import argparse
import asyncio
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import msgspec
from msgspec import Struct

from qualification.engines.engine import MODEL, Engine, missing, ready
from qualification.engines.traffic import text_of
from tests.chaos.routers import RouterProcess, router
from tests.processes import children, of_process

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
PATHS = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)
PROMPTS = 8  # of each API
TOKENS = 200
SLOWLY = {"RUNNER_STEP_S": "0.01"}  # so that answers are under way whenever something happens
CLIENTS = 8
QUIET_S = 20.0  # that an engine sleeps, or stands still
BACK_S = 30.0  # for the router to use it again
LONGEST_S = 120.0  # for one answer
ERRORS = ("error", "response.failed")


class Outcome(Struct):
    """One client's answers and pauses."""

    path: str
    stream: bool
    fault: str = ""  # failed, cut or short; empty: all is well
    said: str = ""  # of the fault
    first_s: float = 0.0  # to the first text; of a whole answer, to its end
    pause_s: float = 0.0  # the longest between two texts


def body_of(path: str, number: int, stream: bool) -> dict[str, Any]:
    text = f"Tell me about the number {number}. " * 8
    fields: dict[str, Any] = {"model": MODEL, "temperature": 0, "stream": stream}
    if path == COMPLETIONS:
        return {**fields, "prompt": text, "max_tokens": TOKENS}
    if path == RESPONSES:
        return {**fields, "input": text, "max_output_tokens": TOKENS, "store": False}
    return {**fields, "messages": [{"role": "user", "content": text}], "max_tokens": TOKENS}


def piece_of(event: dict[str, Any]) -> str:
    """The text that an event of a stream adds, of whichever API."""
    if choices := event.get("choices"):
        return str(choices[0].get("text") or (choices[0].get("delta") or {}).get("content") or "")
    delta = event.get("delta")
    return delta if isinstance(delta, str) else str((delta or {}).get("text", ""))


async def ask(http: httpx2.AsyncClient, path: str, number: int, *, stream: bool) -> tuple[Outcome, str]:
    """Send a request; return its outcome, and its text."""
    outcome, text = Outcome(path, stream), ""
    began_s = last_s = time.monotonic()
    try:
        async with http.stream("POST", path, json=body_of(path, number, stream)) as answer:
            if answer.status_code != 200:
                outcome.fault, outcome.said = "failed", f"{answer.status_code} {(await answer.aread())[:200]!r}"
            elif not stream:
                text = text_of(path, msgspec.json.decode(await answer.aread()))
            else:
                async for line in answer.aiter_lines():
                    payload = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                    if not payload.startswith("{"):
                        continue
                    event = msgspec.json.decode(payload)
                    if event.get("error") or event.get("type") in ERRORS:
                        outcome.fault, outcome.said = "cut", payload[:300]
                    if piece := piece_of(event):
                        now_s = time.monotonic()
                        if text:
                            outcome.pause_s = max(outcome.pause_s, now_s - last_s)
                        outcome.first_s, last_s = outcome.first_s or now_s - began_s, now_s
                        text += piece
    except (httpx2.HTTPError, msgspec.MsgspecError) as error:
        outcome.fault, outcome.said = "cut" if text else "failed", repr(error)
    outcome.first_s = outcome.first_s or time.monotonic() - began_s
    return outcome, text


@asynccontextmanager
async def client(url: str) -> AsyncIterator[httpx2.AsyncClient]:
    limits = httpx2.Limits(max_connections=2 * CLIENTS)
    async with httpx2.AsyncClient(base_url=url, timeout=LONGEST_S, limits=limits, trust_env=False) as http:
        yield http


async def undisturbed(url: str) -> dict[tuple[str, int], str]:
    """The texts of all requests, from an engine that nobody disturbs."""
    texts: dict[tuple[str, int], str] = {}
    async with client(url) as http:
        for path in PATHS:
            for number in range(PROMPTS):
                outcome, text = await ask(http, path, number, stream=False)
                assert not outcome.fault and text, outcome
                texts[path, number] = text
    return texts


async def traffic(url: str, texts: dict[tuple[str, int], str], over: asyncio.Event) -> list[Outcome]:
    """Ask without a pause until it is over."""
    outcomes: list[Outcome] = []

    async def one(number: int, http: httpx2.AsyncClient) -> None:
        while not over.is_set():
            path, prompt, stream = PATHS[number % 4], number // 4 % PROMPTS, number // 3 % 2 == 0
            outcome, text = await ask(http, path, prompt, stream=stream)
            if not outcome.fault and text != texts[path, prompt]:
                outcome.fault, outcome.said = "short", f"{len(text)} of {len(texts[path, prompt])} characters"
            outcomes.append(outcome)
            number += CLIENTS + 1

    async with client(url) as http:
        await asyncio.gather(*(one(number, http) for number in range(CLIENTS)))
    return outcomes


# ---- what happens meanwhile


def wait_used(front: RouterProcess, name: str) -> None:
    deadline_s = time.monotonic() + BACK_S
    while not (status := front.status_of(name))["available"]:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{name} is not used again within {BACK_S:g} s: {status['why']}")
        time.sleep(0.1)


def rolling(front: RouterProcess, engines: Sequence[Engine]) -> None:
    for number, engine in enumerate(engines):
        time.sleep(2)
        engine.process.terminate()
        engine.process.wait(60)
        engine.restart()
        wait_used(front, f"w{number}")


def asleep(front: RouterProcess, engines: Sequence[Engine]) -> None:
    time.sleep(2)
    httpx2.post(f"{engines[0].url}/sleep", timeout=60).raise_for_status()
    time.sleep(QUIET_S)
    assert front.status_of("w0")["why"] == "its engine sleeps", front.status_of("w0")
    httpx2.post(f"{engines[0].url}/wake_up", timeout=60).raise_for_status()
    wait_used(front, "w0")


def paused(front: RouterProcess, engines: Sequence[Engine], mode: str) -> None:
    time.sleep(2)
    httpx2.post(f"{engines[0].url}/pause", params={"mode": mode}, timeout=60).raise_for_status()
    time.sleep(QUIET_S)
    httpx2.post(f"{engines[0].url}/resume", timeout=60).raise_for_status()
    wait_used(front, "w0")


def stopped(front: RouterProcess, engines: Sequence[Engine]) -> None:
    time.sleep(2)
    # One that computes nothing while it has nothing to do is not found out, and need not be.
    number = max(range(len(engines)), key=lambda number: front.status_of(f"w{number}")["in_flight"])
    [core] = [pid for pid in children(engines[number].process.pid) if b"EngineCore" in of_process(pid, "cmdline")]
    os.kill(core, signal.SIGSTOP)
    try:
        time.sleep(QUIET_S)
        status = front.status_of(f"w{number}")
        assert "its engine computes nothing" in str(status["why"]), status
    finally:
        os.kill(core, signal.SIGCONT)
    wait_used(front, f"w{number}")


EVENTS: dict[str, Callable[[RouterProcess, Sequence[Engine]], None]] = {
    "nothing": lambda *_: time.sleep(10),
    "SIGTERM to each": rolling,
    "asleep": asleep,
    "pause, abort": partial(paused, mode="abort"),
    "pause, keep": partial(paused, mode="keep"),
    "EngineCore stopped": stopped,
}
HEADING = (
    f"{'':20} {'requests':>9} {'retries':>8} {'resumes':>8} {'failed':>7} {'cut':>5} {'short':>6}"
    f" {'first text, at most':>20} {'pause, at most':>15}"
)


async def measure(
    name: str, front: RouterProcess, engines: Sequence[Engine], texts: dict[tuple[str, int], str]
) -> list[Outcome]:
    """Let it happen under traffic; what the router or an engine does otherwise than expected is a fault, too."""
    over, said = asyncio.Event(), ""
    asking = asyncio.create_task(traffic(front.url, texts, over))
    try:
        await asyncio.to_thread(EVENTS[name], front, engines)
    except (AssertionError, TimeoutError, httpx2.HTTPError) as error:
        said = repr(error)
    over.set()
    outcomes = await asking
    return [*outcomes, Outcome("event", False, "failed", said)] if said else outcomes


def moved(front: RouterProcess) -> tuple[int, int]:
    """The router's counts of requests sent to another replica before their first byte, and of those continued there."""
    text = front.get("/metrics").body.decode()
    patterns = (rf"^warmroute_router:{name}_total(?:{{.*}})? (.+)$" for name in ("retries", "resumes"))
    retries, resumes = (sum(int(float(one)) for one in re.findall(pattern, text, re.M)) for pattern in patterns)
    return retries, resumes


def show(name: str, outcomes: Sequence[Outcome], retries: int, resumes: int) -> int:
    """Print a row; return the number of faults."""
    faults = Counter(outcome.fault for outcome in outcomes)
    streams = [outcome for outcome in outcomes if outcome.stream]
    first_s, pause_s = (max((getattr(one, what) for one in streams), default=0.0) for what in ("first_s", "pause_s"))
    counts = f"{len(outcomes):9} {retries:8} {resumes:8} {faults['failed']:7} {faults['cut']:5} {faults['short']:6}"
    print(f"{name:20} {counts} {first_s:18.1f} s {pause_s:13.1f} s", flush=True)
    bad = [outcome for outcome in outcomes if outcome.fault]
    for outcome in bad[:8]:
        print(f"    {outcome.path}{' streamed' if outcome.stream else ''}: {outcome.fault}: {outcome.said}", flush=True)
    return len(bad)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m qualification.engines.rolling", description=__doc__)
    parser.add_argument("events", nargs="*", metavar="EVENT", help=f"by default all of: {', '.join(EVENTS)}")
    parser.add_argument("--engines", type=int, default=4, metavar="N", help="vLLM behind the router (default: 4)")
    args = parser.parse_args()
    if unknown := [name for name in args.events if name not in EVENTS]:
        parser.error(f"{unknown[0]!r} is no event; the events are {', '.join(EVENTS)}")
    if reason := missing():
        parser.error(reason)
    bad = 0
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        engines = []
        for number in range(args.engines):  # one after the other: at once, all may take too long on a busy machine
            engines.append(stack.enter_context(ready(Engine(Path(folder) / f"w{number}.jsonl", SLOWLY, ()))))
        texts = asyncio.run(undisturbed(engines[0].url))
        options = ["--model-dir", f"{MODEL}={engines[0].folder / 'model'}"]
        for number, engine in enumerate(engines):
            options += ["--replica", f"name=w{number},url={engine.url},engine=vllm,resume=true"]
        front = stack.enter_context(router(*options, within_s=60))
        print(HEADING, flush=True)
        for name in args.events or EVENTS:
            before = moved(front)
            outcomes = asyncio.run(measure(name, front, engines, texts))
            bad += show(name, outcomes, *(after - one for after, one in zip(moved(front), before, strict=True)))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
