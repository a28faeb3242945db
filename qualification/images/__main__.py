"""`python -m qualification.images [TARGET ...]`: builds what an image holds without a container engine."""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from qualification.images import building
from qualification.images.building import Builder
from qualification.images.dockerfile import read
from qualification.images.figures import PLACE, largest, mebibytes, packages
from qualification.images.trying import try_out, try_ray

NOT_RUN = (
    "No image was built: the steps of the Dockerfile ran over this machine's own file system and Python, "
    "in a mount namespace, without a container engine."
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m qualification.images", description=f"{__doc__} {NOT_RUN}")
    parser.add_argument(
        "targets", metavar="TARGET", nargs="*", default=["router"], help="router (default), replica-cpu"
    )
    parser.add_argument(
        "--build-arg", metavar="NAME=VALUE", action="append", default=[], help="As docker build has it."
    )
    parser.add_argument("--keep", metavar="DIR", type=Path, help="Build in this folder, and leave what was built.")
    chosen = parser.parse_args()
    if reason := building.why_not():
        print(f"cannot be done here: {reason}", file=sys.stderr)
        return 1
    if "replica-gpu" in chosen.targets:
        print("replica-gpu is left to a real build: its packages are gigabytes of CUDA", file=sys.stderr)
        return 2
    folder = chosen.keep or Path(tempfile.mkdtemp(prefix="warmroute-images-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        builder = Builder(read(), folder, dict(each.split("=", 1) for each in chosen.build_arg))
        for target in chosen.targets:
            show(builder, target)
        print("".join(f"left out: {step}\n" for step in builder.left_out), end="")
        print(NOT_RUN)
    finally:
        if chosen.keep is None:
            shutil.rmtree(folder)
    return 0


def show(builder: Builder, target: str) -> None:
    layer = builder.layer(target)
    print(f"{target}: {len(packages(layer))} packages, {mebibytes(layer / PLACE):.0f} MiB in /{PLACE}")
    print("  " + ", ".join(f"{name} {size:.0f}" for name, size in largest(layer, 6)))
    print("  " + try_out(builder.dockerfile, target, layer))
    if "ray" in packages(layer):
        print("  " + try_ray(builder.dockerfile, target, layer))


if __name__ == "__main__":
    sys.exit(main())
