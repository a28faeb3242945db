"""The page for those who come from another router names flags that there are."""

import re

import pytest

from router.process.cli import router
from tests.docs.pages import ROOT

ROW = re.compile(r"\| (.+?) \| (.+) \|")
FLAG = re.compile(r"`(--[a-z-]+)")
OURS = {flag for param in router.params for flag in param.opts}


def rows() -> list[tuple[str, str]]:
    page = (ROOT / "docs/coming-from.md").read_text()
    return [found.groups() for line in page.splitlines() if (found := ROW.fullmatch(line)) is not None]  # type: ignore[misc]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:40])
def test_each_flag_on_the_right_is_one_of_the_router(row: tuple[str, str]) -> None:
    assert set(FLAG.findall(re.sub(r"\(`--[^)]*\)", "", row[1]))) <= OURS


def test_the_page_names_flags() -> None:
    assert len([flag for _, ours in rows() for flag in FLAG.findall(ours)]) > 30
