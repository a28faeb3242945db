"""Check and measure everything on a GPU, section by section: `python -m tests.gpu.run --out DIR`.

Each section runs in a process of its own. This file must not touch the device, and imports only what a bare machine
has until the kit is there (`tests.gpu.kit`).
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from tests.gpu import kit

if TYPE_CHECKING:
    from tests.gpu.apart import Job, Say
    from tests.gpu.report import Report, Section

BUDGET_S = 460.0


class Part(NamedTuple):
    """A section: its approximate time on an H100, and its limit."""

    name: str
    expected_s: float
    limit_s: float


PARTS = (
    Part("kernels", 50, 130),
    Part("golden", 35, 110),
    Part("throughput", 60, 120),
    Part("host", 30, 120),
    Part("adapters", 15, 90),
    Part("serving", 40, 150),
)
NAMES = tuple(part.name for part in PARTS)
HEADER_S = 60.0
NO_GPU = "torch sees no GPU"
QUICK = 0.1  # share of a section's time, with small sizes


@click.command()
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="For the results.")
@click.option("--only", multiple=True, type=click.Choice(NAMES), help="This section; can be given several times.")
@click.option("--budget", default=BUDGET_S, show_default=True, help="Seconds for all; what does not fit is left out.")
@click.option("--device", default="cuda", show_default=True, type=click.Choice(["cuda", "cpu"]), help="Where.")
@click.option("--quick", is_flag=True, help="Sizes that only show that everything runs; on a CPU there are no others.")
def main(out: Path, only: Sequence[str], budget: float, device: str, quick: bool) -> None:
    """Check the kernels and the engine on a GPU, and measure them.

    Exit status: 0 all is as it must be, 1 something is not or could not be computed.
    """
    began_s = time.monotonic()
    if device == "cpu" and not quick:
        raise click.UsageError("--device cpu would take hours; add --quick, which shows only that everything runs")
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder:
        taken = kit.provide(Path(folder))
        if taken:
            click.echo(f"from the kit: {taken}")
        sys.exit(run_all(out, only or NAMES, began_s + budget, device, quick))


def run_all(out: Path, names: Sequence[str], end_s: float, device: str, quick: bool) -> int:
    # Detect the GPU by NVML: a driver initialized here would be unusable in forked processes.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch  # noqa: F401  # here, that no section has to import it again

    from tests.gpu.report import Report, Section

    began_s = time.monotonic()
    sections = [Section(part.name, part.name) for part in PARTS if part.name in names]
    report = Report(out, {"date": time.strftime("%Y-%m-%d", time.gmtime())}, sections)
    echo(began_s, f"{len(sections)} sections; results in {out}")
    report.header |= header(device)
    report.write()
    if report.header.get("error") == NO_GPU:
        raise SystemExit(f"{NO_GPU}; use --device cpu --quick, or mend that")
    for section in sections:
        part = next(part for part in PARTS if part.name == section.name)
        left_s = end_s - time.monotonic()
        if left_s < part.expected_s * (QUICK if quick else 1):
            section.status, section.error = "skipped", f"{left_s:.0f} s are left, it takes about {part.expected_s:g}"
            echo(began_s, f"{section.name}: skipped: {section.error}")
        else:
            echo(began_s, section.name)
            if device == "cpu":
                import_module("tests.replica.device.hosts")  # likewise, and slow
            run_one(section, report, min(part.limit_s, left_s), device, quick, began_s)
            echo(began_s, f"{section.name}: {section.status} after {section.seconds:.1f} s")
        report.write()
    skipped = [section.name for section in sections if section.status == "skipped"]
    echo(began_s, "done" + (f"; skipped: {', '.join(skipped)}" if skipped else ""))
    return int(report.failed)


def run_one(section: "Section", report: "Report", limit_s: float, device: str, quick: bool, began_s: float) -> None:
    from tests.gpu.apart import Ended, apart
    from tests.gpu.report import cell

    section.status, section_began_s = "running", time.monotonic()
    for _, message in apart([job_of(section.name, device, quick, limit_s)], limit_s, leads=True):
        if isinstance(message, Ended):
            section.error = message.error
        elif isinstance(message.what, str):
            section.title = message.what
        else:
            section.rows.append(message.what)
            echo(began_s, f"  {message.what.what}: {cell(message.what)}")
            report.write()
    section.seconds = round(time.monotonic() - section_began_s, 1)
    section.status = "failed" if section.error or any(row.failed for row in section.rows) else "passed"
    if section.error:
        click.echo(section.error, err=True)


def job_of(name: str, device: str, quick: bool, limit_s: float) -> "Job":
    def job(say: "Say") -> None:
        import torch

        from tests.gpu.place import Place
        from tests.gpu.report import Table

        if quick:
            torch.set_num_threads(1)  # jobs run side by side
        torch.set_float32_matmul_precision("highest")  # no TF32, as in a replica
        module: Any = import_module(f"tests.gpu.{name}")
        say(module.TITLE)
        module.run(Place(torch.device(device), quick, time.monotonic() + limit_s), Table(say, judges=not quick))

    return job


def echo(began_s: float, text: str) -> None:
    click.echo(f"[{time.monotonic() - began_s:6.1f} s] {text}")
    sys.stdout.flush()


# ---- description of the machine


def header(device: str) -> dict[str, str]:
    """Describe the machine and the chosen kernels; a process of its own queries the device."""
    from tests.gpu.apart import Ended, apart, last_line

    found: dict[str, str] = {}
    for _, message in apart([lambda say: say(described(device))], HEADER_S):
        if not isinstance(message, Ended):
            found |= message.what
        elif message.error:
            found["error"] = last_line(message.error)
    return {name: value for name, value in found.items() if value}


def described(device: str) -> dict[str, str]:
    import torch

    found = {"Python": sys.version.split()[0], "commit": commit()}
    found["torch"] = torch.__version__
    for name in ("triton", "transformers", "numpy"):
        found[name] = version_of(name)
    if device == "cpu":
        return {"device": "CPU, stands in for a GPU"} | found
    if not torch.cuda.is_available():
        return found | {"error": NO_GPU}
    from kernels.backends import choose
    from kernels.paged import KvShape

    properties = torch.cuda.get_device_properties(0)
    memory = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    choice = choose("auto", "cuda", KvShape(torch.bfloat16, 16, 128))
    passed = "; ".join(f"not {name}: {reason}" for name, reason in choice.passed.items())
    driver = said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return {
        "device": memory,
        "driver": driver[0] if driver else "unknown",
        "CUDA": str(torch.version.cuda),
        **found,
        "attention": choice.attention.name + (f" ({passed})" if passed else ""),
    }


def commit() -> str:
    return kit.COMMIT.read_text() if kit.COMMIT.is_file() else said_by("git", "rev-parse", "--short", "HEAD")


def version_of(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def said_by(*command: str) -> str:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=kit.ROOT, env=os.environ)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout.strip() if ended.returncode == 0 else ""


if __name__ == "__main__":
    main()
