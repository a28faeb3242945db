"""Parts of pages that programs write, each between two marks of its name."""

from typing import NamedTuple

from tests.docs.pages import ROOT


class Part(NamedTuple):
    page: str  # docs/PAGE
    name: str

    def text(self) -> str:
        return self._cut()[1]

    def write(self, text: str) -> None:
        before, _, after = self._cut()
        (ROOT / "docs" / self.page).write_text(before + text + after)

    def _cut(self) -> tuple[str, str, str]:
        """The page before the part, the part, and the page after it; marks belong to what is around them."""
        begin, end = f"<!-- {self.name} -->\n", f"<!-- /{self.name} -->\n"
        before, begun, rest = (ROOT / "docs" / self.page).read_text().partition(begin)
        part, ended, after = rest.partition(end)
        assert begun and ended, f"docs/{self.page} lacks {begin.strip()} ... {end.strip()}"
        return before + begin, part, end + after
