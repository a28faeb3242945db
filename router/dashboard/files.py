"""The dashboard's own files, as the package has them: no build step, nothing from elsewhere."""

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
# Nothing but what the router itself serves is loaded, run or sent anywhere, whatever text a page shows.
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
    """None: there is no such file, or none that is meant to be had."""
    return _all().get(path)


@cache
def _all() -> dict[str, File]:
    """Read once: whatever path is asked for, it is never one of the machine's."""
    return dict(read(STATIC))


def read(folder: Traversable, above: str = "") -> Iterator[tuple[str, File]]:
    """Each file that is meant to be had, by its path."""
    for entry in folder.iterdir():
        path, content_type = above + entry.name, TYPES.get(entry.name.rpartition(".")[2])
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from read(entry, f"{path}/")
        elif content_type is not None:
            content = entry.read_bytes()
            yield path, File(content, content_type, f'"{xxh3_64_hexdigest(content)}"')
