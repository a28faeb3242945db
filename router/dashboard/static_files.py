"""The dashboard's static files, served from the package without a build step."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_64_hexdigest

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "txt": "text/plain; charset=utf-8",
    "svg": "image/svg+xml",
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
STATIC = Path(__file__).parent / "static"


class File(NamedTuple):
    content: bytes
    content_type: str
    etag: str


def find(path: str) -> File | None:
    """The file at a path of the page; None if there is none."""
    return read(STATIC).get(path)


@cache
def read(folder: Path) -> dict[str, File]:
    """Read each public file, once: a request's path is never used on the file system."""
    files: dict[str, File] = {}
    for path in folder.rglob("*"):
        name, content_type = path.relative_to(folder).as_posix(), TYPES.get(path.suffix[1:])
        if content_type is not None and not any(part.startswith(".") for part in name.split("/")) and path.is_file():
            content = path.read_bytes()
            files[name] = File(content, content_type, f'"{xxh3_64_hexdigest(content)}"')
    return files
