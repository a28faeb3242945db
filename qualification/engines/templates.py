"""Print how the router's prompts of odd requests compare with vLLM's own: `python -m qualification.engines.templates`.

A shape counts as verified if vLLM agrees about one of its requests, whichever comes first. So a shape about which it
agrees once and differs once is a wrong claim of exactness.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from api.prompts.prompts import Prompts
from api.tokens.tokenizer import HfTokenizer
from events.blocks import pack_tokens
from qualification.engines.conversations import Conversations
from qualification.engines.engine import QUIET, RUNNER, VARIABLE
from qualification.engines.model import CONFIG, TEMPLATE
from qualification.engines.printing import check
from router.prompts.prompt import read_peek
from router.prompts.tokenizer_probe import token_ids_in
from router.prompts.tokens import Tokens
from tests.api.chat_templates import TEMPLATES
from tests.api.tokenizers import saved
from tests.api.trained import FAMILIES
from tests.router.families import ENDS

SHOWN = ("messages", "tools", "documents", "add_generation_prompt", "enable_thinking", "reasoning_effort", "notes")
AS_JSON = "|".join(f"{{{{ ({name} if {name} is defined else 'UNDEF') | tojson }}}}" for name in SHOWN)
LOOP = "{% for m in messages %}{% for part in m.content %}{% endfor %}{% endfor %}"
PARTS = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}{%- else %}
{%- for part in message.content %}{%- if part.type == 'text' %}{{- part.text }}{%- else %}[{{ part.type }}]{%- endif %}
{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
MODELS = {  # a family of tokenizers, and a template
    "llama3": ("llama3", TEMPLATES["llama3"]),
    "qwen": ("qwen", TEMPLATES["qwen"]),
    "mistral": ("mistral", TEMPLATES["mistral"]),
    "other": ("gpt2", TEMPLATES["other"]),
    "live": ("qwen", TEMPLATE),
    "parts": ("llama3", PARTS),
    "all that a template sees": ("llama2", AS_JSON),
    "the same in parts": ("qwen", LOOP + AS_JSON),
    "the same with developers": ("llama3", AS_JSON + "{# 'developer' #}"),
}
MAX_SHOWN = 5
RENDER = {
    "chat": "/v1/chat/completions/render",
    "completions": "/v1/completions/render",
    "messages": "/v1/messages/render",
    "responses": "/v1/responses/render",
}


class Case(Struct, frozen=True):
    model: str
    body: dict[str, Any]
    ours: bytes
    theirs: bytes
    told: bytes | None  # by `/tokenize`, if that claims to see all fields

    @property
    def is_equal(self) -> bool:
        return self.ours == self.theirs


class Outcome(Struct):
    refused: int = 0  # by vLLM
    not_followed: Counter[str] = Counter()  # the router does not know how vLLM builds the prompt, by reason
    shapes: dict[tuple[str, str | None], list[Case]] = {}

    @property
    def verified(self) -> Iterator[list[Case]]:
        """Cases by shape, of those that one of them would verify."""
        for (_, shape), cases in self.shapes.items():
            if shape is None or any(case.is_equal or case.told == case.ours for case in cases):
                yield cases

    @property
    def equal(self) -> int:
        return sum(case.is_equal for cases in self.verified for case in cases)

    @property
    def wrong(self) -> list[Case]:
        return [case for cases in self.verified for case in cases if not case.is_equal]

    @property
    def never_equal(self) -> list[Case]:
        """The first case of each shape that is never called exact, though the router follows it."""
        verified = {id(cases) for cases in self.verified}
        return [cases[0] for cases in self.shapes.values() if id(cases) not in verified]

    @property
    def misled(self) -> list[Case]:
        """Cases in which `/tokenize` contradicts the router, though the prompt itself is equal."""
        cases = (case for cases in self.shapes.values() for case in cases)
        return [case for case in cases if case.is_equal and case.told not in (None, case.ours)]


def models() -> dict[str, tuple[str, str]]:
    """Return MODELS, and templates of real models, which take the families in turns."""
    real = sorted((Path(os.environ[VARIABLE]) / "templates").glob("*.jinja"))
    return MODELS | {
        path.stem: (family, path.read_text()) for path, family in zip(real, itertools.cycle(FAMILIES), strict=False)
    }


def made(folder: Path, family: str, template: str) -> Path:
    """A model's folder."""
    folder.mkdir()
    bos, eos = ENDS.get(family, ("<s>", "</s>"))
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos}
    saved(FAMILIES[family](), folder, tokenizer_config=tokenizer | {"chat_template": template}, config=CONFIG)
    return folder


class Renderer:
    """vLLM's routes for several models, in one process of its environment."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def ask(self, model: int, path: str, body: bytes) -> list[int] | None:
        """The token ids of an answer; None: it is refused."""
        source, sink = self._process.stdin, self._process.stdout
        assert source is not None and sink is not None
        source.write(json.dumps([model, path, body.decode()]) + "\n")
        source.flush()
        status, answer = json.loads(sink.readline())
        return token_ids_in(answer.encode()) if status == 200 else None


@contextmanager
def rendering(folders: Sequence[Path]) -> Iterator[Renderer]:
    command = [f"{os.environ[VARIABLE]}/venv/bin/python", str(RUNNER / "rendering.py"), *map(str, folders)]
    environment = {**os.environ, **QUIET, "VLLM_LOGGING_LEVEL": "CRITICAL"}
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, env=environment, text=True
        ) as process,
    ):
        yield Renderer(process)


def compare(count: int, seed: int) -> Outcome:
    """Compare this many prompts, in turns of all models."""
    outcome, named = Outcome(), models()
    with tempfile.TemporaryDirectory() as within:
        folders = [made(Path(within) / str(i), *model) for i, model in enumerate(named.values())]
        ours = [Tokens("m", Prompts(HfTokenizer(folder)), strict=False, engine="vllm") for folder in folders]
        with rendering(folders) as renderer:
            asking = Conversations(seed)
            for i in range(count):
                model = i % len(ours)
                add(outcome, list(named)[model], ours[model], *asking.next(), renderer, model)
    return outcome


def add(
    outcome: Outcome, name: str, tokens: Tokens, api: str, asked: dict[str, Any], renderer: Renderer, model: int
) -> None:
    body = json.dumps(asked).encode()
    theirs = renderer.ask(model, RENDER[api], body)
    if theirs is None:
        outcome.refused += 1
        return
    prompt = tokens.draft(api, body, read_peek(body)).finish()
    packed = prompt.packed[0] if prompt.exact else prompt.unverified
    if packed is None:
        outcome.not_followed[prompt.why_not or ""] += 1
        return
    engine = tokens.engine
    assert engine is not None
    question, told = engine.tokenized(api, body), None
    if question is not None and question.unseen is None:
        told = renderer.ask(model, "/tokenize", question.body)
    case = Case(name, asked, packed, pack_tokens(theirs), None if told is None else pack_tokens(told))
    outcome.shapes.setdefault((name, prompt.shape), []).append(case)


def show(cases: Sequence[Case], tokens: str) -> None:
    for case in cases[:MAX_SHOWN]:
        print(f"    {case.model}: {tokens}: {json.dumps(case.body)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m qualification.engines.templates", description=__doc__)
    parser.add_argument("--requests", type=int, default=25_000, metavar="N", help="(default: 25,000)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the requests (default: 1)")
    args = parser.parse_args()
    check(parser, (), (), "row")
    outcome = compare(args.requests, args.seed)
    wrong, never, misled = outcome.wrong, outcome.never_equal, outcome.misled
    followed = sum(map(len, outcome.shapes.values()))
    print(f"{args.requests:,} requests, {outcome.refused:,} of them refused by vLLM")
    print(f"exact and equal: {outcome.equal:,}")
    print(f"exact and wrong: {len(wrong):,}")
    show(wrong, "wrong")
    print(f"not called exact: {sum(outcome.not_followed.values()) + followed - outcome.equal - len(wrong):,}")
    for why, times in outcome.not_followed.most_common():
        print(f"    {times:,}: {why}")
    print(f"    shapes that always differ: {len(never):,}")
    show(never, "differs")
    print(f"exact, and /tokenize tells other tokens: {len(misled):,}")
    show(misled, "told otherwise")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
