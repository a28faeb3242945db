"""Lines like HTTP headers at the head of a prompt, which clients change with every request.

Claude Code writes one that our replicas and vLLM leave out. Where hits show that, it is no fault.
"""

import re
from collections.abc import Sequence

from api.prompts.billing import BILLING_HEADER
from lab.analysis.breaks.finding import Fault
from lab.analysis.breaks.prompts import Piece, Prompt

HEADER = Fault(
    "header line that changes with every request",
    "Leave the line out of the prompt; Claude Code does so with CLAUDE_CODE_ATTRIBUTION_HEADER=0 in its environment.",
)
LINE = re.compile(r"\A[Xx]-[A-Za-z0-9-]{1,64}:[^\n]*")
FEWEST_HITS = 3
SURELY_BEYOND = 200  # letters that hit after the line and the tools, which some templates write first


def without_ignored_lines(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Leave out the lines that the engines leave out, as their hits show."""
    billed = [prompt for prompt in prompts if _is_billed(prompt) and prompt.cached_tokens]
    beyond = sum(map(_hits_beyond, billed))
    if beyond < FEWEST_HITS or 2 * beyond < len(billed):
        return list(prompts)
    return [_unbilled(prompt) if _is_billed(prompt) else prompt for prompt in prompts]


def _is_billed(prompt: Prompt) -> bool:
    return bool(prompt.leading) and prompt.leading[0].text.startswith(BILLING_HEADER)


def _hits_beyond(prompt: Prompt) -> bool:
    letters = sum(len(piece.text) for piece in prompt.pieces)
    found = (prompt.cached_tokens or 0) / max(1, prompt.tokens) * letters
    line = prompt.leading[0].text.partition("\n")[0]
    return found > len(line) + sum(map(len, prompt.tools)) + SURELY_BEYOND


def _unbilled(prompt: Prompt) -> Prompt:
    first, *others = prompt.leading
    return prompt._replace(leading=(Piece(first.role, first.text.partition("\n")[2]), *others))
