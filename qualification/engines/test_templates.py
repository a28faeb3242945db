"""Odd requests over all templates: what is called exact is what vLLM makes of them."""

import pytest

from qualification.engines.engine import missing
from qualification.engines.templates import compare


@pytest.mark.live
@pytest.mark.timeout(300)
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_no_prompt_that_is_called_exact_differs() -> None:
    outcome = compare(1500, seed=2)
    assert outcome.equal > 700
    assert outcome.wrong == outcome.misled == []
