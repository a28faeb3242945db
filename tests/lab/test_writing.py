"""Result files: replaced, written into, or refused with a message."""

import os
import stat
import threading
from pathlib import Path

import click
import pytest

from api.process.settings import Unusable
from lab.plots import check_plot, drawing
from lab.writing import check_file, write_whole


def test_a_file_is_made_or_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "o.json"
    write_whole(path, "first and long")
    write_whole(path, b"second")
    assert path.read_bytes() == b"second"
    assert list(tmp_path.iterdir()) == [path]


def test_a_pipe_is_written_into_and_stays_one(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()), daemon=True)
    reader.start()
    write_whole(path, b"through")
    is_pipe = stat.S_ISFIFO(path.stat().st_mode)
    reader.join(10 if is_pipe else 0)
    assert (is_pipe, read) == (True, [b"through"])


@pytest.mark.parametrize("is_there", [True, False])
def test_what_a_link_leads_to_is_replaced_and_not_the_link(tmp_path: Path, is_there: bool) -> None:
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    target.parent.mkdir()
    if is_there:
        target.write_text("before")
    link.symlink_to(target)
    write_whole(link, "after")
    assert link.is_symlink()
    assert target.read_text() == "after"
    assert list(target.parent.iterdir()) == [target]


def test_a_file_that_cannot_be_written_is_reported_with_its_path_and_why(tmp_path: Path) -> None:
    path = tmp_path / "no" / "o.json"
    with pytest.raises(click.ClickException) as raised:
        write_whole(path, "text")
    assert raised.value.message == f"cannot write {str(path)!r}: No such file or directory"


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match=r"--order: '.*' is a folder; name a file in it"):
        check_file(tmp_path, "--order")
    with pytest.raises(Unusable, match=r"--order: '.*/no' is not a folder; create it"):
        check_file(tmp_path / "no" / "file", "--order")


def test_a_folder_is_no_picture(tmp_path: Path) -> None:
    folder = tmp_path / "plots.svg"
    folder.mkdir()
    with pytest.raises(Unusable, match="is a folder"):
        check_plot(folder)


@pytest.mark.parametrize(("name", "begins"), [("o.PNG", b"\x89PNG"), ("o.Svg", b"<?xml")])
def test_a_suffix_means_the_same_in_any_case(tmp_path: Path, name: str, begins: bytes) -> None:
    with drawing(tmp_path / name, title="t", x="x", y="y") as axes:
        axes.plot([1, 2], [3, 4])
    assert (tmp_path / name).read_bytes().startswith(begins)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_picture_goes_where_a_link_leads(tmp_path: Path) -> None:
    link = tmp_path / "o.svg"
    link.symlink_to(tmp_path / "real")
    with drawing(link, title="t", x="x", y="y") as axes:
        axes.plot([1, 2], [3, 4])
    assert link.is_symlink()
    assert b"</svg>" in (tmp_path / "real").read_bytes()
