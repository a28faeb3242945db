"""Set up what tests of engines run: `python -m qualification.engines.setup DIR` makes DIR/venv, model and templates.

vLLM and SGLang go into an environment of their own, about 9 GB; a second run finishes what is missing.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from qualification.engines.model import make

VLLM = "vllm==0.33.0"
MORE = ("msgpack", "xxhash")  # read lazily by vLLM and SGLang
TEMPLATES = "llama-cpp-python==0.3.36"  # its sources have llama.cpp's collection of models' templates
SGLANG = "sglang==0.5.23"  # without its dependencies, which ask for another torch than vLLM's
SGLANG_IMPORTS = ("gguf", "ipython", "traitlets")  # at the top of the modules that its worker reads
OVERRIDES = "certifi\nnvidia-cutlass-dsl; sys_platform == 'none'\n"  # any of the first; none, as it breaks imports
TOLD = {"index-url": "UV_INDEX_URL", "extra-index-url": "UV_EXTRA_INDEX_URL", "find-links": "UV_FIND_LINKS"}
CHECK = "import vllm, sglang.srt.mem_cache.radix_cache; print('vLLM', vllm.__version__)"


def registries(listed: str) -> dict[str, str]:
    """The registries in the output of `pip config list`, as uv wants to hear of them."""
    told = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # as pip chooses among several
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        name = TOLD.get(key.rpartition(".")[2])
        if name is not None:  # the first counts: pip lists its environment before its files
            told.setdefault(name, " ".join(value.strip("'\"").replace("\\n", " ").split()))
    return told


def uv(folder: Path) -> tuple[tuple[str, ...], dict[str, str]]:
    """Put uv into the environment in this folder, and make that first; return its command and its variables."""
    python = folder / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", "uv"], check=True)
    listed = subprocess.run([python, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True)
    return (str(python), "-m", "uv"), {**registries(listed.stdout), **os.environ}


def install(folder: Path) -> None:
    """Install both engines into DIR/venv."""
    python = folder / "venv/bin/python"
    command, environment = uv(folder / "venv")
    overrides = folder / "overrides.txt"
    overrides.write_text(OVERRIDES)
    told = (*command, "pip", "install", "-q", "--python", str(python))
    subprocess.run((*told, "--override", overrides, VLLM, *MORE), env=environment, check=True)
    subprocess.run((*told, "--no-deps", SGLANG, *SGLANG_IMPORTS), env=environment, check=True)
    subprocess.run((python, "-c", CHECK), env={**environment, "VLLM_TARGET_DEVICE": "cpu"}, check=True)


def collect(folder: Path) -> None:
    """Put the templates of real models into DIR/templates."""
    wanted = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", TEMPLATES)
    with tempfile.TemporaryDirectory() as download:
        subprocess.run((*wanted, "--dest", download), check=True)
        (source,) = Path(download).glob("*.tar.gz")
        with tarfile.open(source) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.name.endswith(".jinja") else None
                if content is not None:
                    (folder / Path(member.name).name).write_bytes(content.read())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m qualification.engines.setup", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="where; not within the repository")
    parser.add_argument("--model-only", action="store_true", help="install nothing, and make DIR/model anew")
    args = parser.parse_args()
    folder: Path = args.folder.resolve()
    if not args.model_only:
        install(folder)
        (folder / "templates").mkdir(exist_ok=True)
        collect(folder / "templates")
    make(folder / "model")
    print(f"set WARMROUTE_LIVE={folder}")


if __name__ == "__main__":
    main()
