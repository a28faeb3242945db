"""The dashboard's files: all there, nothing else, and nothing from elsewhere."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.dashboard import static_files
from tests.router.loopback import until
from tests.router.scripted import Answer, connect, served

STATIC = Path(static_files.__file__).parent / "static"
ALL = sorted(path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.is_file())
# Where one file names another: in attributes, and in imports of scripts and styles.
REFERENCE = re.compile(r"""(?:src|href)="([^"#]+)"|(?:from|import)\s*\(?\s*["'](\.[^"']+)["']|url\(["']?([^"')#]+)""")


def referenced() -> Iterator[tuple[str, str]]:
    """References between files, as pairs of paths below `static`."""
    for name in ALL:
        if name.rpartition(".")[2] not in ("html", "js", "mjs", "css"):
            continue
        for found in REFERENCE.finditer((STATIC / name).read_text()):
            wanted = next(filter(None, found.groups()))
            if name.endswith(".html"):  # pages lie beside the folder, as a browser sees it
                yield name, wanted.removeprefix("dashboard/")
            else:
                yield name, (STATIC / name).parent.joinpath(wanted).resolve().relative_to(STATIC).as_posix()


async def get(path: str, method: str = "GET", **headers: str) -> Answer:
    async with served() as running, connect(running.port, 2**20) as client:
        answer = await client.ask(method, path, **headers)
        await until(lambda: running.router.lifecycle.open_requests == 0, "it has ended")
        return answer


def test_each_file_has_a_type_that_is_served() -> None:
    assert static_files.INDEX in ALL
    for name in ALL:
        found = static_files.find(name)
        assert found is not None, f"{name} would not be served; see static_files.TYPES"
        assert found.content == (STATIC / name).read_bytes()


@pytest.mark.parametrize(("name", "wanted"), sorted(set(referenced())))
def test_what_a_file_names_is_there(name: str, wanted: str) -> None:
    assert "://" not in wanted and not wanted.startswith("//"), f"{name} would load something from another origin"
    assert static_files.find(wanted) is not None, f"{name} names {wanted}"


async def test_the_page_and_its_files_are_served_with_their_types() -> None:
    for path, name in (("/dashboard", static_files.INDEX), *((f"/dashboard/{name}", name) for name in ALL[:3])):
        answer = await get(path)
        assert (answer.status, answer.body) == (200, (STATIC / name).read_bytes()), path
        assert answer.headers["content-type"] == static_files.TYPES[name.rpartition(".")[2]]
        assert answer.headers["content-security-policy"].startswith("default-src 'self';")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-cache"


async def test_what_the_browser_has_already_is_not_sent_again() -> None:
    first = await get("/dashboard")
    again = await get("/dashboard", if_none_match=first.headers["etag"])
    assert (again.status, again.body) == (304, b"")
    assert again.headers["content-security-policy"] == first.headers["content-security-policy"]
    assert (await get("/dashboard", if_none_match='"other"')).status == 200


async def test_head_says_what_get_would_send() -> None:
    page, head = await get("/dashboard"), await get("/dashboard", "HEAD")
    assert (head.status, head.body) == (200, b"")
    assert {**head.headers, "date": "", "x-request-id": ""} == {**page.headers, "date": "", "x-request-id": ""}


async def test_a_folder_that_is_named_leads_to_the_page() -> None:
    answer = await get("/dashboard/")
    assert (answer.status, answer.headers["location"]) == (308, "../dashboard")


@pytest.mark.parametrize(
    "path",
    [
        "/dashboard/nothing.js",
        "/dashboard/nothing",
        "/dashboard/js",
        "/dashboard/.hidden.js",
        "/dashboard/replicas",
        f"/dashboard/{'a' * 300}.js",  # longer than a file's name may be
    ],
)
async def test_nothing_else_is_to_be_had(path: str) -> None:
    answer = await get(path)
    assert (answer.status, answer.error["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    "path",
    [
        *("/dashboard//index.html", "/dashboard/../static_files.py", "/dashboard/..%2ffiles.py"),
        *("/dashboard/%2e%2e/files.py", "/dashboard/js/../../static_files.py", "/dashboard/js/..%5c..%5cindex.html"),
        *("/dashboard/js%2fmain.js", "/dashboard/index.html%00.js", "/dashboard/%2fetc%2fhosts.txt"),
        *("/dashboard//etc/hosts.txt", "/dashboard/index.html/", "/dashboard/fleet.html/../feed.js"),
    ],
)
async def test_a_path_with_two_readings_is_refused(path: str) -> None:
    answer = await get(path)
    assert (answer.status, answer.error["code"]) == (400, "invalid_path")


def test_what_is_hidden_or_no_page_is_not_to_be_had(tmp_path: Path) -> None:
    (tmp_path / "js").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("page.txt", "js/page.js", ".hidden.txt", "page.py", ".git/page.txt"):
        (tmp_path / name).write_text(name)
    assert {path: file.content for path, file in static_files.read(tmp_path).items()} == {
        "page.txt": b"page.txt", "js/page.js": b"js/page.js"
    }  # fmt: skip


def test_no_name_leads_out_of_the_folder() -> None:
    """The negative control: the file is there."""
    assert (STATIC / "../static_files.py").is_file() and (STATIC / static_files.INDEX).is_file()
    for name in (
        "../static_files.py",
        f"./{static_files.INDEX}",
        f"js/../{static_files.INDEX}",
        str(STATIC / static_files.INDEX),
        "",
        "/",
    ):
        assert static_files.find(name) is None, name


async def test_a_page_is_only_read() -> None:
    for method in ("POST", "DELETE"):
        answer = await get("/dashboard", method, content_length="0")
        assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")
