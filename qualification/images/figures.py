"""Packages of an image and their size."""

from importlib.metadata import distributions
from pathlib import Path

PLACE = "opt/warmroute"


def site_packages(layer: Path) -> Path:
    [found] = (layer / PLACE / "lib").glob("python3.*/site-packages")
    return found


def packages(layer: Path) -> dict[str, str]:
    """Name and version of each distribution that is installed."""
    found = distributions(path=[str(site_packages(layer))])
    return {each.metadata["Name"].lower().replace("_", "-"): each.version for each in found}


def mebibytes(folder: Path) -> float:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files) / 2**20


def largest(layer: Path, count: int) -> list[tuple[str, float]]:
    sizes = [(path.name, mebibytes(path)) for path in site_packages(layer).iterdir() if path.is_dir()]
    return sorted(sizes, key=lambda each: -each[1])[:count]
