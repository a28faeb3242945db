"""Every kernel against a reference of higher precision: the tests of `tests/kernels`, on this device."""

import os
import subprocess
import sys

import torch

from kernels.paged import KvShape
from tests.gpu.kit import ROOT
from tests.gpu.place import Place, unusable
from tests.gpu.report import Table

TITLE = "kernels against references of higher precision"
FOLDER = ROOT / "tests" / "kernels"
ON_GPU = ("adapters", "attention", "pointwise", "sampling")
ON_CPU = ("plain", "sampling")


def run(place: Place, table: Table) -> None:
    for block_size in (16, 32):
        for name, reason in unusable(place, KvShape(torch.bfloat16, block_size, 64)).items():
            table.note(f"attention {name}, bf16, blocks of {block_size}", f"not here: {reason}")
    folder, names = (FOLDER / "gpu", ON_GPU) if place.is_gpu else (FOLDER, ON_CPU)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not grid", "--rootdir", str(ROOT)]
    command += ["-c", str(FOLDER / "gpu" / "triton.ini"), "--confcutdir", str(folder), f"-n{place.at_once}"]
    failed = []
    for name in names:
        ended = subprocess.run(
            [*command, str(folder / f"test_{name}.py")],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            timeout=place.left_s,
        )
        said = (ended.stdout.strip().splitlines() or [ended.stderr[-500:]])[-1]
        passed = ended.returncode == 0 and " passed" in said
        table.check(name, passed, said, "all passed")
        failed += [] if passed else [ended.stdout[-5000:] + ended.stderr[-2000:]]
    if failed:
        raise RuntimeError(failed[0])
