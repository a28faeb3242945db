"""`python3.12 -m qualification.images.base`: makes a base like python:3.12-slim-bookworm without a registry.

Debian comes from mmdebstrap, and Python is the one that runs this, which needs no packages for it. It needs root.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
PYTHON = f"python{VERSION}"
LIBRARIES = (
    "ca-certificates libbz2-1.0 libexpat1 libffi8 liblzma5 libreadline8 libsqlite3-0 libssl3 libuuid1 netbase zlib1g"
)
# apt leaves no caches of its own in a layer, as in Docker's images of Debian.
WITHOUT_CACHES = ('--aptopt=Dir::Cache::pkgcache ""', '--aptopt=Dir::Cache::srcpkgcache ""')
ENVIRONMENT = ("PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8")


def image(version: str) -> str:
    """The name of a base with this version of Python."""
    return f"localhost/python:{version}-slim-bookworm"


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        root, archive = Path(folder) / "root", Path(folder) / "base.tar"
        _run("mmdebstrap", "--variant=minbase", *WITHOUT_CACHES, f"--include={LIBRARIES}", "bookworm", str(root))
        copy_python(root / "usr" / "local")
        _run("chroot", str(root), "ldconfig")
        _run("tar", "--create", f"--file={archive}", "--exclude=./dev/*", f"--directory={root}", ".")
        _run("podman", "import", *(f"--change=ENV {each}" for each in ENVIRONMENT), str(archive), image(VERSION))


def copy_python(local: Path) -> None:
    """This Python with its pip, where Docker's image has it: in /usr/local."""
    prefix = Path(sys.base_prefix)
    (local / "bin").mkdir(parents=True, exist_ok=True)
    shutil.copytree(prefix / "lib" / PYTHON, local / "lib" / PYTHON, symlinks=True, ignore=_unused, dirs_exist_ok=True)
    for library in (prefix / "lib").glob("libpython*.so*"):
        shutil.copy2(library, local / "lib", follow_symlinks=False)
    shutil.copy2(prefix / "bin" / PYTHON, local / "bin" / PYTHON)
    for name in ("python", "python3"):
        (local / "bin" / name).symlink_to(PYTHON)


def _unused(folder: str, names: list[str]) -> set[str]:
    """Names to leave out: in site-packages all but pip, elsewhere the library's tests and tools."""
    if folder.endswith("/site-packages"):
        return {name for name in names if not name.startswith("pip")}
    return {"test", "idlelib", "tkinter", "__pycache__"}.intersection(names)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
