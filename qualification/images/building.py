"""A stand-in for a container engine: runs the stages of the Dockerfile over this machine's own file system.

Each stage is a layer of an overlay, in a mount namespace of its own, so that its commands find and leave the paths that
they name and nothing of this machine changes. It needs root. What differs from a real build: the layer at the bottom is
this machine with its own Python, not the base image, and steps that install Debian's packages are left out.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from qualification.images import context
from qualification.images.base import PYTHON, copy_python
from qualification.images.dockerfile import ROOT, Dockerfile, Instruction, Stage, filled
from tests.events.processes import wait_until

NEEDED = ("unshare", "nsenter", "setpriv", "mount", "ip")
USER = 10001
PATH = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"


def why_not() -> str | None:
    """Reason why this machine cannot build, or None."""
    if sys.platform != "linux" or os.getuid() != 0:
        return "it mounts, which needs root on Linux"
    if absent := [name for name in NEEDED if shutil.which(name) is None]:
        return f"there is no {absent[0]}"
    if not (Path(sys.base_prefix) / "lib" / PYTHON).is_dir() or sys.base_prefix == "/usr":
        return "Python is a part of the system here, and cannot be copied"
    with tempfile.TemporaryDirectory() as folder:
        layer = Path(folder) / "layer"
        layer.mkdir()
        tried = inside(layer, "true", {"PATH": PATH})
    return f"it cannot mount: {tried.stderr.strip()}" if tried.returncode else None


class Builder:
    """Builds the requested stages, each once; a stage's result is a folder, to be laid over `/`."""

    def __init__(self, dockerfile: Dockerfile, folder: Path, arguments: Mapping[str, str]) -> None:
        self.dockerfile = dockerfile
        self.folder = folder
        self.arguments = arguments
        self.built: dict[str, Path] = {}
        self.left_out: list[str] = []

    def layer(self, name: str) -> Path:
        if name not in self.built:
            stage = self.dockerfile.stages[name]
            below = self.layer(stage.base) if stage.base in self.dockerfile.stages else self._base()
            self.built[name] = self._build(stage, below)
        return self.built[name]

    def _base(self) -> Path:
        """A Python in /usr/local, as in Docker's image."""
        folder = self.folder / "base"
        if folder.exists():
            return folder
        copy_python(folder / "usr" / "local")
        found = inside(folder, "ldconfig", {"PATH": PATH})  # the library that was copied, before the system's own
        assert found.returncode == 0, found.stderr
        return folder

    def _build(self, stage: Stage, below: Path) -> Path:
        layer = self.folder / stage.name
        # With the overlay's marks of removed files: device files and attributes.
        subprocess.run(["cp", "--archive", str(below), str(layer)], check=True)
        variables = dict(self.dockerfile.arguments)
        for each in stage.instructions:
            if each.keyword == "ARG":
                name, _, default = each.value.partition("=")
                variables[name] = self.arguments.get(name, default)
            elif each.keyword == "COPY":
                self._copy(each, layer, self._workdir(stage))
            elif each.keyword == "RUN":
                self._run(each, layer, stage, variables)
        return layer

    def _workdir(self, stage: Stage) -> str:
        return next((each.value for each in reversed(stage.all("WORKDIR"))), "/")

    def _copy(self, each: Instruction, layer: Path, workdir: str) -> None:
        *sources, target = each.words
        into = layer / os.path.join(workdir, target).strip("/")
        origin = each.flag("from")
        for source in sources:
            if origin is not None:
                found = self.layer(origin) / source.strip("/")
                _lay(found, into / found.name if target.endswith("/") and found.is_file() else into)
            else:
                self._copy_context(source, into, whole=target.endswith("/"))

    def _copy_context(self, source: str, into: Path, *, whole: bool) -> None:
        below = [name for name in context.files() if name == source or name.startswith(f"{source}/")]
        assert below, f"COPY {source}: no such file, or it is ignored"
        for name in below:
            target = into / (name if whole else os.path.relpath(name, source))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)

    def _run(self, each: Instruction, layer: Path, stage: Stage, variables: Mapping[str, str]) -> None:
        if "apt-get" in each.value:
            self.left_out.append(f"{stage.name}, line {each.line}: apt-get")
            return
        environment = build_environment(self.dockerfile, stage.name) | dict(variables)
        done = inside(layer, each.value, environment, workdir=self._workdir(stage))
        if done.returncode != 0:
            raise AssertionError(f"line {each.line} of the Dockerfile failed:\n{done.stdout}\n{done.stderr}")


def _lay(source: Path, target: Path) -> None:
    """Copy over existing files, as COPY does."""
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


def build_environment(dockerfile: Dockerfile, name: str) -> dict[str, str]:
    """The Dockerfile's environment, with this machine's pip and proxy settings as defaults."""
    ours = {key: value for key, value in os.environ.items() if key.startswith("PIP_") or key.lower().endswith("_proxy")}
    ours |= {"PIP_NO_CACHE_DIR": "1", "HOME": "/root", "LANG": "C.UTF-8", "PATH": PATH}
    return ours | run_environment(dockerfile, name)


def run_environment(dockerfile: Dockerfile, name: str) -> dict[str, str]:
    base = {"PATH": PATH, "LANG": "C.UTF-8"}
    return base | {key: filled(value, base) for key, value in dockerfile.environment(name).items()}


def inside(
    layer: Path, script: str, environment: Mapping[str, str], *, workdir: str = "/"
) -> subprocess.CompletedProcess[str]:
    """Runs a shell's script as root where the layer can be written to."""
    return subprocess.run(
        [*_unshare("--mount"), STEP, "sh", *_pairs(environment), "sh", "-euc", f"cd {workdir}\n{script}"],
        env=_mounted(layer) | {"WORKDIR": workdir},
        capture_output=True,
        text=True,
        check=False,
    )


STEP = """
mount -t overlay overlay -o "$OPTIONS" "$ROOT"
mount --rbind /dev "$ROOT/dev"
mount -t proc proc "$ROOT/proc"
mkdir -p "$ROOT$WORKDIR"
exec chroot "$ROOT" env -i "$@"
"""

# Volumes are replaced by file systems in memory.
PROCESS = """
mount -t overlay overlay -o "ro,$OPTIONS" "$ROOT"
mount --rbind /dev "$ROOT/dev"
mount -t proc proc "$ROOT/proc"
mount -t tmpfs -o mode=1777 tmpfs "$ROOT/tmp"
mount -t tmpfs -o uid=10001,gid=10001 tmpfs "$ROOT/models"
ip link set lo up
exec chroot "$ROOT" "$@"
"""


class Container:
    """An image's command as process 1, as its user, on a read-only file system, with a network of its own."""

    def __init__(
        self,
        dockerfile: Dockerfile,
        name: str,
        layer: Path,
        arguments: Sequence[str] | None = None,
        entrypoint: Sequence[str] | None = None,
    ) -> None:
        self._user = [*AS_USER, "env", "-i", *_pairs(run_environment(dockerfile, name))]
        first = dockerfile.last(name, "ENTRYPOINT").words if entrypoint is None else entrypoint
        command = dockerfile.last(name, "CMD").words if arguments is None else arguments
        self._process = subprocess.Popen(
            [
                *_unshare("--mount", "--pid", "--net", "--fork"),
                PROCESS,
                "sh",
                *self._user,
                *first,
                *command,
            ],
            env=_mounted(layer),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a command beside it, as a health check runs."""
        where = ["nsenter", "--target", str(self.pid), "--mount", "--pid", "--net", "--root", "--wd"]
        return subprocess.run([*where, *self._user, *command], capture_output=True, text=True, check=False)

    @property
    def pid(self) -> int:
        """Process id of the container's process 1, seen from outside; it starts very soon."""
        unshare = self._process.pid
        children = Path(f"/proc/{unshare}/task/{unshare}/children")
        wait_until(children.read_text, "process 1 has begun")
        return int(children.read_text().split()[0])

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self, limit_s: float) -> tuple[int, str]:
        """Wait for the end; return the exit status and the output."""
        said, _ = self._process.communicate(timeout=limit_s)
        return self._process.returncode, said

    def close(self) -> None:
        """Kill process 1, and with it all others. (unshare cannot kill its child itself after the change of user.)"""
        if self.running:
            self.signal(signal.SIGKILL)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._process.wait()


AS_USER = ("setpriv", "--reuid", str(USER), "--regid", str(USER), "--clear-groups", "--no-new-privs")


def _unshare(*namespaces: str) -> list[str]:
    return ["unshare", *namespaces, "--propagation", "private", "--", "sh", "-euc"]


def _pairs(environment: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in environment.items()]


def _mounted(layer: Path) -> dict[str, str]:
    """Environment that names the overlay's folders and its mount point."""
    work, root = (layer.with_name(f"{layer.name}.{suffix}") for suffix in ("work", "root"))
    for folder in (work, root):
        folder.mkdir(exist_ok=True)
    return os.environ | {"OPTIONS": f"lowerdir=/,upperdir={layer},workdir={work}", "ROOT": str(root)}
