"""The other side of every client: a router before two replicas that compute a small model without a meaning."""

import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from qualification.clients.verdicts import Check
from replica.model.demo import demo_folder
from tests.api.chat_templates import QWEN
from tests.chaos.replicas import Command, command
from tests.chaos.routers import RouterProcess, router

MODEL = "demo"
KEY = "none"  # the router refuses clients that do not send it
REPLICAS = 2
READY_S = 120.0  # they import torch, and that may have to wait for the disk
FAULT = re.compile(r"Traceback| ERROR ")
QUIET = ("--log-level", "warning")
BIASES = {'"': 21.0, "}": 14.0, "]": 14.0}  # the model gives about 20 to what it calls likely, and -8 to these


def make(folder: Path) -> None:
    """Copy the demo model, with a template that shows tools and an inclination to end what it has begun in JSON."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(demo_folder(), folder)
    (folder / "chat_template.jinja").write_text(QWEN)
    weights = load_file(folder / "model.safetensors")
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    for token, bias in BIASES.items():
        weights["lm_head.weight"][ids[token], 0] = bias  # the first dimension is 1 for every token
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


class Serving:
    """A router and its replicas, with an eye on their logs."""

    def __init__(self, model: Path, front: RouterProcess, replicas: list[Command]) -> None:
        self.model = model
        self.url = front.url
        self._logs = [server.err for server in (front, *replicas)]
        self._read = [0 for _ in self._logs]

    def new_faults(self) -> list[str]:
        """The lines about errors since the last call."""
        found = [
            line for log, read in zip(self._logs, self._read, strict=True) for line in log[read:] if FAULT.search(line)
        ]
        self._read = [len(log) for log in self._logs]
        return found

    def new_checks(self) -> tuple[Check, ...]:
        """Report the errors since the last call as a failed check."""
        faults = self.new_faults()
        return (Check("logs of the servers", error=faults[0]),) if faults else ()


@contextmanager
def served(model: Path) -> Iterator[Serving]:
    """Run a router that demands a key, before two replicas of the model."""
    options = ("--model", model, "--served-model-name", MODEL, "--engine", "native", "--kv-cache-gb", 0.1)
    with ExitStack() as stack:
        replicas = [stack.enter_context(command(*options, *QUIET, ready=False)) for _ in range(REPLICAS)]
        for replica in replicas:
            replica.wait_ready(READY_S)
        named = [text for replica in replicas for text in ("--replica", replica.url)]
        yield Serving(model, stack.enter_context(router(*named, *QUIET, "--api-key", KEY, within_s=READY_S)), replicas)
