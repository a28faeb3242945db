"""Lines of a file that grows, is cut, and is replaced by another one."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.process.settings import Unusable
from lab.shadow.incoming import Splitter, lines_of_file

MOST = 8
WITHIN_S = 10.0


@given(st.lists(st.text("ab \n", max_size=12).map(str.encode)))
def test_however_the_bytes_come_the_lines_are_the_same(parts: list[bytes]) -> None:
    splitter = Splitter(MOST)
    found = [line for part in parts for line in splitter.feed(part)] + list(splitter.end())
    expected = [
        line if len(line) <= MOST else None
        for line in b"".join(parts).split(b"\n")
        if len(line) > MOST or (line and not line.isspace())
    ]
    assert found == expected


async def next_of(lines: AsyncIterator[bytes | None]) -> bytes | None:
    async with asyncio.timeout(WITHIN_S):
        return await anext(lines)


async def test_a_file_is_read_from_its_beginning_and_followed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntw")
    async with aclosing(lines_of_file(str(path), 100, follow=True)) as lines:
        assert await next_of(lines) == b"one"
        with path.open("ab") as file:
            file.write(b"o\n")
        assert await next_of(lines) == b"two"
        path.write_bytes(b"3\n")  # cut, and written anew
        assert await next_of(lines) == b"3"
        (tmp_path / "new").write_bytes(b"four\n")
        os.replace(tmp_path / "new", path)
        assert await next_of(lines) == b"four"


async def test_without_following_it_ends_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\n\n" + b"x" * 200 + b"\ntwo")
    assert [line async for line in lines_of_file(str(path), 100, follow=False)] == [b"one", None, b"two"]


@pytest.mark.parametrize("kind", ["folder", "pipe"])
async def test_only_ordinary_files_are_opened_by_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "it"
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    with pytest.raises(Unusable, match="is no ordinary file; give -"):
        await anext(lines_of_file(str(path), 100, follow=True))
