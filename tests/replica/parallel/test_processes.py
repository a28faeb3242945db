"""The processes of a replica with several ranks: how they start, and how they end together."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from replica.build import build
from replica.config import LoraModule
from replica.cpu import leader as runner
from replica.cpu.runner import load
from replica.parallel.followers import Followers
from replica.transformer import Transformer
from tests.events.processes import wait_until
from tests.processes import is_alive
from tests.replica.lora.adapters import saved_adapter
from tests.replica.models import config_of, logits, saved
from tests.replica.natives import SMALL, Native, completion, native, tokens
from tests.replica.parallel.conftest import followers_of, reading_other_files

TWO = ("--tensor-parallel-size", 2)
PROMPT = [1, 2, 3] * 12


@pytest.fixture
def served(folder: Path) -> Iterator[Native]:
    with native(saved("qwen3", folder), *SMALL, *TWO) as running:
        yield running


def said(served: Native) -> list[str]:
    """The lines on stderr, but for the note that the model has no tokenizer."""
    return [line for line in "".join(served.err).splitlines() if not line.startswith("Note: ")]


def wait_gone(*pids: int) -> None:
    wait_until(lambda: not any(is_alive(pid) for pid in pids), f"{pids} are gone")


def test_a_replica_answers_with_two_processes_and_ends_both(served: Native) -> None:
    answer = tokens(served, PROMPT)
    assert logits("qwen3", [*PROMPT, *answer[:-1]])[len(PROMPT) - 1 :].argmax(-1).tolist() == answer
    engine = served.engine_pid
    [follower] = followers_of(engine)
    assert served.end() == 0
    wait_gone(engine, follower)
    assert not said(served)


def test_ranks_that_read_other_adapters_do_not_begin(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = LoraModule("a", str(saved_adapter("llama", "all", folder)))
    reading_other_files(monkeypatch, saved_adapter("llama", "patterns", folder))
    with pytest.raises(ValueError, match="'a' changed while they were read"):
        build(config_of(saved("llama", folder), tensor_parallel_size=2, lora_modules=(module,)))
    assert not followers_of(os.getpid())


@pytest.mark.grid
def test_an_engine_that_is_killed_leaves_no_rank(served: Native) -> None:
    engine = served.engine_pid
    [follower] = followers_of(engine)
    os.kill(engine, signal.SIGKILL)
    assert served.end(None) == 1
    wait_gone(engine, follower)


def test_a_rank_that_dies_in_a_step_ends_the_replica(served: Native) -> None:
    engine = served.engine_pid
    [follower] = followers_of(engine)
    os.kill(follower, signal.SIGSTOP)  # the engine comes to wait for it in a collective
    connection = HTTPConnection(served.host, served.port)
    connection.request("POST", "/v1/completions", json.dumps(completion(PROMPT)))
    wait_until(lambda: served.load()["open_requests"], "the engine has the request")
    os.kill(follower, signal.SIGKILL)
    assert served.end(None) == 1
    connection.close()
    wait_gone(engine, follower)
    died, ended = said(served)
    assert died.endswith("ERROR the engine's rank 1 of 2 died (signal 9)")
    assert ended == "Error: the engine's process ended with status 1; the replica ends with it"


# ---- a start that fails


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pids of followers that were started."""
    pids: list[int] = []

    class Counted(Followers):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            pids.extend(self.pids)

    monkeypatch.setattr(runner, "Followers", Counted)
    return pids


def test_weights_that_only_another_rank_reads_are_reported(folder: Path, tmp_path: Path, started: list[int]) -> None:
    broken = shutil.copytree(saved("qwen3", folder), tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"][:, -1] = 1e6
    save_file(weights, broken / "model.safetensors")
    with pytest.raises(ValueError, match=r"mlp\.down_proj\.weight has values that float16 cannot hold"):
        build(config_of(broken, tensor_parallel_size=2, dtype="float16"))
    wait_gone(*started)


def test_a_rank_that_dies_while_it_loads_is_reported(
    folder: Path, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killing(*arguments: Any) -> Transformer:
        os.kill(started[0], signal.SIGKILL)
        return load(*arguments)

    monkeypatch.setattr(runner, "load", killing)
    with pytest.raises(OSError, match=r"the engine's rank 1 of 4 died \(signal 9\)"):
        build(config_of(saved("llama", folder), tensor_parallel_size=4))
    assert len(started) == 3
    wait_gone(*started)
