"""The dashboard's static files, served from the package without a build step."""

from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import NamedTuple

from xxhash import xxh3_64_hexdigest

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "mjs": "text/javascript; charset=utf-8",
    "json": "application/json",
    "webmanifest": "application/manifest+json",
    "txt": "text/plain; charset=utf-8",
    "svg": "image/svg+xml",
    "png": "image/png",
    "ico": "image/x-icon",
    "woff2": "font/woff2",
}
INDEX = "index.html"
# A page loads, runs and sends nothing but the router's own files, whatever prompts it shows.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
STATIC = files("router.dashboard") / "static"


class File(NamedTuple):
    content: bytes
    content_type: str
    etag: str


def find(path: str) -> File | None:
    """The file at a path of the page; None if there is none."""
    return _all().get(path)


@cache
def _all() -> dict[str, File]:
    """All files, read once: a request's path is never used on the file system."""
    return dict(read(STATIC))


def read(folder: Traversable, above: str = "") -> Iterator[tuple[str, File]]:
    """Yield each public file with its path."""
    for entry in folder.iterdir():
        path, content_type = above + entry.name, TYPES.get(entry.name.rpartition(".")[2])
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from read(entry, f"{path}/")
        elif content_type is not None:
            content = entry.read_bytes()
            yield path, File(content, content_type, f'"{xxh3_64_hexdigest(content)}"')
