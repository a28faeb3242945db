"""The dashboard's own files, as the package has them: no build step, nothing from elsewhere."""

from importlib.resources import files
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
    parts = path.split("/")
    content_type = TYPES.get(parts[-1].rpartition(".")[2])
    if content_type is None or not all(map(_is_plain, parts)):
        return None
    found = STATIC.joinpath(*parts)
    if not found.is_file():
        return None
    content = found.read_bytes()
    return File(content, content_type, f'"{xxh3_64_hexdigest(content)}"')


def _is_plain(part: str) -> bool:
    """No way up or elsewhere, on any system."""
    return part.isascii() and part.replace("-", "").replace("_", "").replace(".", "").isalnum() and part[0] != "."
