"""`warmroute fetch`: a model's files, whole or not at all, from the hub, or made."""

import ast
import errno
import hashlib
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from api.process.settings import Unusable
from api.tokens import tokenizer
from api.tokens.tokenizer import HfTokenizer
from replica.fetching.fetch import fetch_model
from replica.fetching.files import TOKENIZER_FILES, FetchFailed
from replica.model.demo import SIZES
from tests.events.processes import wait_until
from tests.replica.hub import COMMIT, Standin, standing_in
from tests.replica.model.test_demo import DIGESTS

OF_ROUTERS = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json", "generation_config.json"}
# A router's image has none of these.
WITHOUT = ("torch", "numpy", "safetensors", "ray")


@pytest.fixture(scope="module")
def demo(demo_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    [found] = demo_cache.glob("demo-*")
    made = tmp_path_factory.mktemp("fetched") / "demo"
    shutil.copytree(found, made)
    return made


@pytest.fixture
def hub(demo: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Standin]:
    files = {file.name: file.read_bytes() for file in demo.iterdir()}
    unread = {"README.md": b"x", "original/model.safetensors": b"x", "consolidated.safetensors": b"x"}
    with standing_in(files | unread | {"additional_chat_templates/tool_use.jinja": b"with tools"}) as standin:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", standin.url)  # in this process
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield standin


def command(*arguments: object, without: tuple[str, ...] = ()) -> list[str]:
    """`warmroute fetch`, where these modules are not installed."""
    hidden = f"for name in {without!r}: sys.modules[name] = None"
    script = f"import sys\n{hidden}\nfrom fleet.cli import main\nmain()"
    return [sys.executable, "-c", script, "fetch", *map(str, arguments)]


def environment(home: Path, **more: str) -> dict[str, str]:
    """Nothing of the user's reaches the hub's library, which does not give up a download that a test holds."""
    others = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "http", "HTTP", "all_p"))}
    own = {"HF_HOME": str(home / "hf-home"), "HF_HUB_DOWNLOAD_TIMEOUT": "60", "TERM": "dumb", "COLUMNS": "100"}
    return others | own | more


def fetch(
    home: Path, *arguments: object, without: tuple[str, ...] = (), **more: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments, without=without),
        env=environment(home, **more),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def filled(model: object, folder: Path, *, tokenizer_only: bool = False, revision: str | None = None) -> bool:
    """Fill the folder, without a process of its own; return False if there was nothing to do."""
    how = {"tokenizer_only": tokenizer_only, "revision": revision}
    return fetch_model(str(model), folder, **how, say=lambda _: None)[1]  # type: ignore[arg-type]


def refusal(model: object, folder: Path, *, tokenizer_only: bool = False, revision: str | None = None) -> str:
    with pytest.raises(FetchFailed) as refused:
        filled(model, folder, tokenizer_only=tokenizer_only, revision=revision)
    return str(refused.value)


def visible(folder: Path) -> set[str]:
    files = (file.relative_to(folder) for file in folder.rglob("*") if file.is_file())
    return {str(file) for file in files if file.parts[0] != ".warmroute"}


def kept(folder: Path) -> int:
    """The files that the hub's library considers complete: it records each one last of all."""
    return sum(1 for record in folder.rglob("*.metadata") if record.stat().st_size)


def halves(folder: Path) -> list[Path]:
    return list(folder.rglob("*.incomplete"))


# ---- what is there in the end


def test_the_demo_model_is_made(tmp_path: Path) -> None:
    done = fetch(tmp_path, "demo", tmp_path / "new" / "demo")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"'{tmp_path}/new/demo' holds demo-1: 6 files, 12.1 MB; fetched in ")
    files = {file.name: file for file in (tmp_path / "new" / "demo").iterdir() if file.is_file()}
    assert {name: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for name, file in files.items()} == DIGESTS
    assert stat.S_IMODE((tmp_path / "new" / "demo").stat().st_mode) == 0o777 & ~_umask()


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def test_a_routers_part_of_the_demo_model_needs_a_base_install(tmp_path: Path) -> None:
    done = fetch(tmp_path, "demo", tmp_path / "demo", "--tokenizer-only", without=(*WITHOUT, "huggingface_hub"))
    assert done.returncode == 0, done.stderr
    assert visible(tmp_path / "demo") == OF_ROUTERS
    assert HfTokenizer(tmp_path / "demo").chat_template is not None


def test_a_model_of_the_hub_is_downloaded(hub: Standin, demo: Path, tmp_path: Path) -> None:
    done = fetch(tmp_path, "org/name", tmp_path / "model", HF_ENDPOINT=hub.url)
    assert done.returncode == 0, done.stderr
    assert f"' holds org/name at {COMMIT}: 7 files, 12.1 MB; fetched in " in done.stdout
    first, *others = done.stderr.splitlines()
    assert first == f"fetching org/name: 7 files, 12.1 MB into '{tmp_path}/model'"
    assert [line.partition(" in ")[0] for line in others] == [
        "downloading: 12.1 MB",
        "downloading: done",
    ]  # and no bars
    assert visible(tmp_path / "model") == {*SIZES, "additional_chat_templates/tool_use.jinja"}
    for name in SIZES:
        assert (tmp_path / "model" / name).read_bytes() == (demo / name).read_bytes()
    assert not (tmp_path / "model" / ".warmroute" / "files").exists()


def test_a_routers_part_of_a_model_of_the_hub_needs_no_more_than_its_library(hub: Standin, tmp_path: Path) -> None:
    done = fetch(tmp_path, "org/name", tmp_path / "m", "--tokenizer-only", without=WITHOUT, HF_ENDPOINT=hub.url)
    assert done.returncode == 0, done.stderr
    assert visible(tmp_path / "m") == {*OF_ROUTERS, "additional_chat_templates/tool_use.jinja"}
    assert "model.safetensors" not in hub.downloads()


def test_all_files_that_the_tokenizer_reads_are_fetched() -> None:
    """Else a router would make other prompts than the replica does."""
    assert tokenizer.__file__ is not None
    nodes = ast.walk(ast.parse(Path(tokenizer.__file__).read_text()))
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    named = {text for text in texts if text.endswith((".json", ".jinja")) and " " not in text}
    assert named == {Path(name).name for name in TOKENIZER_FILES}


# ---- once more


@pytest.mark.parametrize("tokenizer_only", [[], ["--tokenizer-only"]], ids=["all", "tokenizer"])
def test_a_second_run_needs_no_network_and_writes_nothing(
    hub: Standin, tmp_path: Path, tokenizer_only: list[str]
) -> None:
    folder = tmp_path / "model"
    assert fetch(tmp_path, "org/name", folder, *tokenizer_only, HF_ENDPOINT=hub.url).returncode == 0
    hub.asked.clear()
    before = {file: file.stat().st_mtime_ns for file in [folder, *folder.rglob("*")]}
    assert not filled("org/name", folder, tokenizer_only=True)
    assert hub.asked == []
    assert {file: file.stat().st_mtime_ns for file in [folder, *folder.rglob("*")]} == before


def test_what_is_lost_or_cut_is_fetched_again_and_nothing_else(hub: Standin, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    assert fetch(tmp_path, "org/name", folder, HF_ENDPOINT=hub.url).returncode == 0
    (folder / "tokenizer.json").unlink()
    os.truncate(folder / "chat_template.jinja", 10)
    hub.asked.clear()
    assert fetch(tmp_path, "org/name", folder, HF_ENDPOINT=hub.url).returncode == 0
    assert hub.downloads() == ["chat_template.jinja", "tokenizer.json"]
    assert {name: (folder / name).stat().st_size for name in SIZES} == SIZES


def test_the_rest_of_a_model_comes_from_the_same_commit(hub: Standin, tmp_path: Path) -> None:
    """Though `main` is another one by now: files of two commits make no model."""
    folder = tmp_path / "model"
    assert fetch(tmp_path, "org/name", folder, "--tokenizer-only", HF_ENDPOINT=hub.url).returncode == 0
    hub.commit = "f" * 40
    hub.asked.clear()
    done = fetch(tmp_path, "org/name", folder, HF_ENDPOINT=hub.url)
    assert f"at {COMMIT}: 7 files" in done.stdout, done.stderr
    assert hub.downloads() == ["model.safetensors"]


# ---- half-way


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_seen_of_a_download_that_ends_half_way_and_the_next_one_continues(
    hub: Standin, demo: Path, tmp_path: Path, number: signal.Signals
) -> None:
    hub.held = "model.safetensors"
    folder = tmp_path / "model"
    arguments = command("org/name", folder)
    running = subprocess.Popen(
        arguments, env=environment(tmp_path, HF_ENDPOINT=hub.url), stderr=subprocess.PIPE, text=True
    )
    assert hub.holds.wait(30)
    wait_until(lambda: len(hub.downloads()) == 7, "all files have been asked for")
    running.send_signal(number)
    _, said = running.communicate(timeout=20)
    assert running.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert ("Ended; the same command keeps the files that are whole.\n" in said) == (number != signal.SIGKILL)
    assert visible(folder) == set()
    hub.held = None
    hub.go_on.set()
    done = fetch(tmp_path, "org/name", folder, HF_ENDPOINT=hub.url)
    assert done.returncode == 0, done.stderr
    for name in SIZES:
        assert (folder / name).read_bytes() == (demo / name).read_bytes()


def test_a_crash_while_files_are_put_in_place_leaves_no_model(tmp_path: Path) -> None:
    """At whichever file it comes, what readers look for is missing until all else is there."""
    for count in (0, 1, len(OF_ROUTERS) - 1):
        folder = tmp_path / str(count)
        script = (
            "import os, sys\nfrom pathlib import Path\nreplace = Path.replace\nleft = [int(sys.argv[1])]\n"
            "def crash(self, target):\n"
            "    if '/.warmroute/files/' in str(self):\n"
            "        if left[0] == 0: os._exit(9)\n"
            "        left[0] -= 1\n"
            "    return replace(self, target)\n"
            "Path.replace = crash\nfrom fleet.cli import main\nmain(['fetch', *sys.argv[2:]])"
        )
        crashed = subprocess.run(
            [sys.executable, "-c", script, str(count), "demo", str(folder), "--tokenizer-only"],
            env=environment(tmp_path),
            capture_output=True,
            check=False,
        )
        assert crashed.returncode == 9
        assert len(visible(folder)) == count
        assert not (folder / "tokenizer.json").exists()
        assert filled("demo", folder, tokenizer_only=True)
        assert visible(folder) == OF_ROUTERS


def test_a_restarted_fetch_keeps_its_commit_and_leaves_no_halves(hub: Standin, tmp_path: Path) -> None:
    """`main` has moved meanwhile. Unfinished files would take up space."""
    hub.held = "model.safetensors"
    folder = tmp_path / "model"
    for _ in ("begun", "begun anew"):
        hub.holds.clear()
        running = subprocess.Popen(command("org/name", folder), env=environment(tmp_path, HF_ENDPOINT=hub.url))
        assert hub.holds.wait(30)
        wait_until(lambda: kept(folder) == 6 and len(halves(folder)) == 1, "all files but the held one are whole")
        running.kill()
        running.wait(20)
        assert len(halves(folder)) == 1
        hub.commit = "f" * 40
    hub.held = None
    hub.go_on.set()
    hub.asked.clear()
    done = fetch(tmp_path, "org/name", folder, HF_ENDPOINT=hub.url)
    assert f"at {COMMIT}: 7 files" in done.stdout, done.stderr
    assert hub.downloads() == ["model.safetensors"]
    assert {file.name for file in (folder / ".warmroute").iterdir()} == {"lock", "record.json"}


def test_of_a_model_that_came_half_nothing_is_taken_for_another(hub: Standin, demo: Path, tmp_path: Path) -> None:
    """Its files may well have the same names and sizes."""
    hub.files["config.json"] = hub.files["config.json"].swapcase()
    hub.cut = "tokenizer.json"
    done = fetch(tmp_path, "org/name", tmp_path / "model", "--tokenizer-only", HF_ENDPOINT=hub.url)
    assert done.returncode == 1
    assert filled("demo", tmp_path / "model", tokenizer_only=True)
    assert (tmp_path / "model" / "config.json").read_bytes() == (demo / "config.json").read_bytes()


def test_a_download_that_is_cut_is_an_error_and_shows_nothing(hub: Standin, tmp_path: Path) -> None:
    hub.cut = "tokenizer.json"
    done = fetch(tmp_path, "org/name", tmp_path / "model", "--tokenizer-only", HF_ENDPOINT=hub.url)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("Error: ")
    assert "Traceback" not in done.stderr
    assert visible(tmp_path / "model") == set()


@pytest.mark.parametrize(
    ("model", "status", "said"),
    [("org/name", 0, "there already"), ("demo", 1, "/model' holds org/name, not demo-1; remove it, or name another")],
    ids=["the same", "another"],
)
def test_of_two_models_for_one_folder_the_second_waits_and_finds_it_done_or_is_refused(
    hub: Standin, tmp_path: Path, model: str, status: int, said: str
) -> None:
    hub.held = "tokenizer.json"
    how: Any = {"env": environment(tmp_path, HF_ENDPOINT=hub.url), "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    first = subprocess.Popen(command("org/name", tmp_path / "model", "--tokenizer-only"), **how, text=True)
    assert hub.holds.wait(30)
    second = subprocess.Popen(command(model, tmp_path / "model", "--tokenizer-only"), **how, text=True)
    assert second.stderr is not None
    assert second.stderr.readline().endswith("/model'; waiting for it\n")
    hub.go_on.set()
    assert "fetched in" in first.communicate(timeout=30)[0]
    assert said in "".join(second.communicate(timeout=30))
    assert second.returncode == status
    assert hub.downloads().count("tokenizer.json") == 1


def test_a_volume_without_locks_is_filled_anyway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems have no locks; a warning says so, because two fetches could then collide."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    said: list[str] = []
    fetch_model("demo", tmp_path / "copy", tokenizer_only=True, revision=None, say=said.append)
    assert visible(tmp_path / "copy") == OF_ROUTERS
    assert said[0].endswith("is on a volume without locks (No locks available); let one process alone fill it")


# ---- what cannot be


def test_a_model_or_a_revision_that_the_hub_does_not_have(hub: Standin, tmp_path: Path) -> None:
    assert hub.url
    assert refusal("org/other", tmp_path / "model") == (
        "cannot get 'org/other' from the hub: there is none of this name, or it is private; "
        "check the name, or set HF_TOKEN"
    )
    said = refusal("org/name", tmp_path / "model", revision="v9")
    assert "'org/name@v9' from the hub: it has no revision 'v9'; name a branch, a tag or a commit" in said


def test_a_model_that_lacks_what_is_needed(hub: Standin, tmp_path: Path) -> None:
    del hub.files["tokenizer.json"]
    hub.files["q4.gguf"] = b"x"
    said = refusal("org/name", tmp_path / "model", tokenizer_only=True)
    assert said == "org/name has no tokenizer.json, but q4.gguf: name that file as --model; name a model that has one"
    del hub.files["model.safetensors"]
    said = refusal("org/name", tmp_path / "model")
    assert said.startswith("org/name has no weights in safetensors, but q4.gguf: name that file as --model")
    assert visible(tmp_path / "model") == set()


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("HF_HUB_OFFLINE", "1", "HF_HUB_OFFLINE forbids to ask it; unset that, or name a folder"),
        ("HF_ENDPOINT", "http://127.0.0.1:1", "is http://127.0.0.1:1 reachable from here? HF_ENDPOINT names another"),
    ],
    ids=["offline", "unreachable"],
)
def test_a_hub_that_cannot_be_asked(tmp_path: Path, setting: str, value: str, said: str) -> None:
    done = fetch(tmp_path, "org/name", tmp_path / "model", without=(), **{setting: value})
    assert done.returncode == 1
    assert done.stderr.startswith("Error: cannot get 'org/name' from the hub: ") and said in done.stderr


def test_without_the_hubs_library_the_way_to_it_is_reported(tmp_path: Path) -> None:
    done = fetch(tmp_path, "org/name", tmp_path / "model", without=("huggingface_hub",))
    assert done.returncode == 1
    assert done.stderr == (
        "warmroute fetch needs huggingface_hub, which is not installed. Install it with: pip install 'warmroute[hub]'\n"
    )
    assert not (tmp_path / "model").exists()


@pytest.mark.usefixtures("hub")
def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    """Ignore files that every volume has."""
    (tmp_path / "model" / "lost+found").mkdir(parents=True)
    (tmp_path / "model" / "..data").mkdir()
    assert filled("demo", tmp_path / "model", tokenizer_only=True)
    assert "holds demo-1, not org/name; remove it, or name" in refusal("org/name", tmp_path / "model")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    said = refusal("demo", tmp_path / "full")
    assert "holds 'mine.txt' already, from elsewhere; name a folder that" in said
    assert visible(tmp_path / "full") == {"mine.txt"}


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = refusal("demo", tmp_path / "file" / "model")
    assert "Not a directory" in said and "; name a folder that can be written to" in said


@pytest.mark.parametrize(
    ("model", "folder", "revision", "said"),
    [
        ("llama", "new", None, "'llama' is no model; name a model of the hub such as ORG/NAME, smollm2 or demo"),
        ("./none", "new", None, "./none does not exist; name the folder of a model, or a hub id such as org/name"),
        ("file.gguf", "new", None, "file.gguf is a file; name the folder of a model"),
        ("demo", "file.gguf", None, "'file.gguf' is a file; name a folder"),
        ("model", "new", None, "'model' is a folder already; name it as --model or --model-dir, or copy it"),
        ("demo", "new", "v1", "'demo' has no revisions, and --revision is 'v1'"),
    ],
)
def test_unusable_values_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, folder: str, revision: str | None, said: str
) -> None:
    (tmp_path / "file.gguf").touch()
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises((Unusable, ValueError), match=re.escape(said)):
        filled(model, Path(folder), revision=revision)
    assert not (tmp_path / "new").exists()
