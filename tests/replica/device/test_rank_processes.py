"""How processes with a device each start and end.

A process belongs to one group at a time, so these are apart from the tests that share an engine.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest
from safetensors.torch import load_file, save_file

from replica.config import LoraModule
from replica.device import leader
from replica.device.leader import lead
from replica.lora.adapter import Adapters
from tests.processes import children
from tests.replica.device.hosts import on_devices
from tests.replica.device.test_ranks import SMALL
from tests.replica.lora.adapters import saved_adapter
from tests.replica.models import config_of, saved


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def test_fewer_gpus_than_ranks_are_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    config = config_of(saved("qwen3", folder), tensor_parallel_size=4)
    with pytest.raises(ValueError, match=r"--tensor-parallel-size 4: this replica sees 2 GPUs .* give 2 or less"):
        lead(config)


@pytest.mark.grid
def test_weights_that_only_another_rank_reads_are_reported(folder: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(saved("qwen3", folder), tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"][:, -1] = 1e6
    save_file(weights, broken / "model.safetensors")
    with pytest.raises(ValueError, match=r"mlp\.down_proj\.weight has values that float16 cannot hold"):
        on_devices(broken, 2, dtype="float16", graphs=False, **SMALL)


@pytest.mark.grid
def test_ranks_that_read_other_adapters_do_not_begin(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = LoraModule("a", str(saved_adapter("llama", "all", folder)))
    other, read = saved_adapter("llama", "patterns", folder), Adapters.read
    monkeypatch.setattr(Adapters, "read", lambda adapters, name, _: read(adapters, name, other))
    with pytest.raises(ValueError, match="'a' changed while they were read"):
        on_devices(saved("llama", folder), 2, lora_modules=(module,), graphs=False, **SMALL)


@pytest.mark.grid
def test_ranks_that_cannot_meet_are_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("Distributed package doesn't have NCCL built in")

    monkeypatch.setattr(leader, "DeviceGroup", fail)
    with pytest.raises(OSError, match=r"the engine's 2 ranks cannot meet: .*NCCL"):
        on_devices(saved("qwen3", folder), 2)


ENGINE = """
from pathlib import Path
from tests.replica.device.hosts import on_devices
from tests.replica.models import submit

engine = on_devices(Path({folder!r}), 2, graphs=False, max_num_batched_tokens=64, max_num_seqs=6)
submit(engine, 0, [1, 2, 3] * 12, max_tokens=400)
print("ready", flush=True)
while True:
    engine.step()
"""


@pytest.mark.chaos
def test_a_rank_that_dies_ends_the_engine(folder: Path) -> None:
    script = ENGINE.format(folder=str(saved("qwen3", folder)))
    with subprocess.Popen([sys.executable, "-c", script], stdout=PIPE, stderr=PIPE, text=True) as engine:
        assert engine.stdout is not None and engine.stderr is not None
        assert engine.stdout.readline() == "ready\n"
        [follower] = children(engine.pid)
        os.kill(follower, signal.SIGKILL)
        assert engine.wait(timeout=30) == 1
        assert "the engine's rank 1 of 2 died (signal 9)" in engine.stderr.read()
