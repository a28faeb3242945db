from pathlib import Path

import click
import pytest

from lab.plots import drawing


@pytest.mark.parametrize(("name", "begins"), [("o.PNG", b"\x89PNG"), ("o.Svg", b"<?xml")])
def test_a_suffix_means_the_same_in_any_case(tmp_path: Path, name: str, begins: bytes) -> None:
    with drawing(tmp_path / name, title="t", x="x", y="y") as axes:
        axes.plot([1, 2], [3, 4])
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "o.svg").mkdir()
    with (
        pytest.raises(click.ClickException, match="cannot write"),
        drawing(tmp_path / "o.svg", title="t", x="x", y="y"),
    ):
        pass
