"""A replica as users start one: its HTTP answers, its events, and how it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import zmq
from safetensors.torch import save_file

from events.messages import BlockStored, decode_batch
from replica.model.config import parse_config
from replica.transformer import Transformer
from tests.gpu.engines import RandomWeights, fields_of
from tests.gpu.kit import ROOT
from tests.gpu.place import Place
from tests.gpu.report import Table
from tests.processes import children
from tests.replica.shapes import QWEN3_06B

TITLE = "`warmroute replica` in processes of its own"
POLL_S = 0.02
READY_S, ANSWER_S, END_S, EVENT_S = 120.0, 60.0, 30.0, 15.0
SECOND_MODEL_S = 45.0  # the least time it takes
TEXT = "Once upon a time there was a cache, and whoever came back to it found what had been said before. " * 4


class Served(NamedTuple):
    process: "subprocess.Popen[bytes]"
    port: int
    events: str
    line: str

    @property
    def pids(self) -> list[int]:
        """Process ids of the server and its engine."""
        return [self.process.pid, *children(self.process.pid)]


def run(place: Place, table: Table) -> None:
    with TemporaryDirectory() as folder:
        check(place, table, "demo", "demo", Path(folder))
        if place.left_s < place.size(SECOND_MODEL_S, 0.0):
            table.note("a Qwen3-0.6B with random weights", "left out: there was no time")
            return
        check(place, table, "qwen3", str(save(place, Path(folder) / "qwen3")), Path(folder))


def save(place: Place, folder: Path) -> Path:
    """A checkpoint without a tokenizer: a token is a byte then."""
    fields, weights = fields_of(place, QWEN3_06B), RandomWeights(place.device, keeps=True)
    Transformer(parse_config(fields, "the shape"), weights, 16)
    folder.mkdir()
    save_file({name: tensor.cpu() for name, tensor in weights.kept.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields))
    weights.kept.clear()
    if place.is_gpu:
        torch.cuda.empty_cache()
    return folder


def check(place: Place, table: Table, name: str, model: str, folder: Path) -> None:
    began_s = time.monotonic()
    with replica(place, model, folder / f"{name}.log") as served:
        table.figure(f"{name}: ready after", [time.monotonic() - began_s], "s")
        table.note(f"{name}: says", served.line)
        answers(table, name, served)
        events(table, name, served)
        status, left = ended(served)
    table.check(f"{name}: SIGTERM ends it", status == 0, f"status {status}", "status 0")
    table.check(f"{name}: processes left behind", not left, str(len(left)), "0")


@contextmanager
def replica(place: Place, model: str, log: Path) -> Iterator[Served]:
    command = [sys.executable, "-m", "fleet", "replica", "--model", model, "--device", place.device.type]
    command += ["--events-port", "0", "--port", "0", "--set=die_with_parent=true", "--served-model-name", "model"]
    command += place.size([], ["--max-num-seqs", "8"])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    with open(log, "wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env=environment)
    try:
        yield ready(process, log)
    finally:
        process.kill()
        process.wait()


def ready(process: "subprocess.Popen[bytes]", log: Path) -> Served:
    def said() -> str:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("ready on ")]
        if not lines and process.poll() is not None:
            raise RuntimeError(f"it ended with status {process.returncode}: {log.read_text(errors='replace')[-2000:]}")
        return lines[0] if lines else ""

    line = eventually(said, READY_S, f"the replica is ready; {log} says why not")
    port = int(line.split(",")[0].rpartition(":")[2])
    served = Served(process, port, line.rpartition("events ")[2], line)
    eventually(lambda: asked(served, "GET", "/ready").status == 200, READY_S, f"/ready says 200; {log} says why not")
    return served


def eventually(condition: Callable[[], Any], limit_s: float, what: str) -> Any:
    end_s = time.monotonic() + limit_s
    while not (found := condition()):
        if time.monotonic() > end_s:
            raise RuntimeError(f"not within {limit_s:g} s: {what}")
        time.sleep(POLL_S)
    return found


# ---- HTTP


class Answer(NamedTuple):
    status: int
    body: bytes


def asked(served: Served, method: str, path: str, body: Any = None) -> Answer:
    connection = HTTPConnection("127.0.0.1", served.port, timeout=ANSWER_S)
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        answer = connection.getresponse()
        return Answer(answer.status, answer.read())
    finally:
        connection.close()


def answers(table: Table, name: str, served: Served) -> None:
    """Each question twice, and the answer whole and in parts; the second time its beginning is cached."""
    common = {"model": "model", "max_tokens": 16, "temperature": 0}
    for path, question, text_of in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}, of_chat),
        ("/v1/completions", {"prompt": TEXT[::-1]}, of_completion),
    ):
        first, again = (whole(served, path, common | question) for _ in range(2))
        # Not the first: cached values need not round as computed ones, and weights are random.
        same = text_of(again) == streamed(served, path, common | question, text_of)
        cached = [cached_tokens(answer) for answer in (first, again)]
        measured = f"{first['usage']['completion_tokens']} tokens, then {cached[1]} cached"
        measured += "" if same else "; streamed it says something else"
        met = same and cached[0] == 0 < cached[1]
        table.check(f"{name}: {path}", met, measured, "cached the second time; streamed the same")


def whole(served: Served, path: str, body: dict[str, Any]) -> Any:
    status, answer = asked(served, "POST", path, body)
    if status != 200:
        raise RuntimeError(f"{path} says {status}: {answer[:500]!r}")
    return json.loads(answer)


def streamed(served: Served, path: str, body: dict[str, Any], text_of: Callable[[Any], str]) -> str:
    status, answer = asked(served, "POST", path, body | {"stream": True})
    events_said = [line.removeprefix("data: ") for line in answer.decode().splitlines() if line.startswith("data: ")]
    if status != 200 or events_said[-1:] != ["[DONE]"]:
        raise RuntimeError(f"{path} streams {status}: {answer[-500:]!r}")
    return "".join(text_of(json.loads(said)) for said in events_said[:-1])


def of_chat(answer: Any) -> str:
    return "".join((choice.get("message") or choice["delta"]).get("content") or "" for choice in answer["choices"])


def of_completion(answer: Any) -> str:
    return "".join(choice["text"] for choice in answer["choices"])


def cached_tokens(answer: Any) -> int:
    details = answer["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


# ---- events, and the end


def events(table: Table, name: str, served: Served) -> None:
    """Send new prompts until an event arrives: a new subscriber misses the first events."""
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.linger = 0
        socket.subscribe(b"")
        socket.connect(served.events)
        stored, prompts = 0, 0
        end_s = time.monotonic() + EVENT_S
        while not stored and time.monotonic() < end_s:
            prompts += 1
            whole(served, "/v1/completions", {"model": "model", "prompt": f"{prompts}: {TEXT}", "max_tokens": 1})
            while socket.poll(300):
                batch = decode_batch(socket.recv_multipart()[-1])
                stored += sum(len(event.block_hashes) for event in batch.events if isinstance(event, BlockStored))
    table.check(f"{name}: events", stored > 0, f"{stored} blocks stored, after {prompts} prompts", "> 0")


def ended(served: Served) -> tuple[int, list[int]]:
    """Exit status, and the processes that are left a little later."""
    pids = served.pids
    served.process.send_signal(signal.SIGTERM)
    status = served.process.wait(END_S)
    end_s = time.monotonic() + END_S
    while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < end_s:
        time.sleep(POLL_S)
    return status, left
