"""The other half of the pages of `test_walks`, in a file of its own so that two workers share them."""

from pathlib import Path

import pytest

from tests.docs.walking import needs_namespaces, walked
from tests.docs.walks import WALKS


@pytest.mark.chaos
@pytest.mark.timeout(300)
@needs_namespaces
@pytest.mark.parametrize("page", list(WALKS)[1::2])
@pytest.mark.usefixtures("smollm2")
def test_a_reader_can_run_the_commands_of(page: str, tmp_path: Path) -> None:
    walked(page, tmp_path)
