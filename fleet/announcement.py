"""What `warmroute up` shows when all replicas are ready: what runs where, and how to ask it."""

import json
import shlex
from collections.abc import Mapping, Sequence

from fleet.child import Ready
from replica.config import EngineConfig

QUESTION = "Why does a warm cache answer sooner than a cold one?"
SIMULATED = (
    "The engine is simulated: its text is made up and its time is a clock's,",
    "but batching, caching and the events about it are real.",
)
DEMO = (
    "The demo model is small and was never trained, so it babbles; what computes,",
    "caches and serves it is what serves every model.",
)


def remark_on(engine: EngineConfig) -> Sequence[str]:
    """What not to expect of it."""
    if engine.engine == "simulated":
        return SIMULATED
    return DEMO if engine.model == "demo" else ()


def announcement(url: str, ready: Mapping[str, Ready], *, remark: Sequence[str] = (), guarded: bool) -> str:
    """Lines that fit into 80 columns where host and model are short."""
    count, model = len(ready), next(iter(ready.values())).model
    who = f"{count} replicas of {model} answer" if count > 1 else f"A replica of {model} answers"
    lines = ["", f"{who} at {url}", ""]
    for name, at in sorted(ready.items(), key=lambda item: (len(item[0]), item)):
        lines.append(f"  {name}  http://{authority(at.host, at.port)}  events {at.events or 'off'}")
    lines += ["", *remark] if remark else []
    lines += ["", "Ask twice: the second answer comes from a warm cache (cached_tokens).", ""]
    lines += [f"  {line}" for line in curl(model, url, guarded)]
    lines += ["", "Or from Python, after `pip install openai`:", ""]
    lines += [f"  {line}" for line in python(model, url, guarded)]
    return "\n".join([*lines, ""])


def curl(model: str, url: str, guarded: bool) -> list[str]:
    body = (
        f'{{"model": {json.dumps(model)}, "max_tokens": 16,\n'
        f'     "messages": [{{"role": "user", "content":\n       "{QUESTION}"}}]}}'
    )
    key = ['  -H "Authorization: Bearer $WARMROUTE_API_KEY" \\'] if guarded else []
    return [
        f"curl {url}/v1/chat/completions \\",
        *key,
        "  -H 'Content-Type: application/json' \\",
        *f"  -d {shlex.quote(body)}".splitlines(),
    ]


def python(model: str, url: str, guarded: bool) -> list[str]:
    key = 'os.environ["WARMROUTE_API_KEY"]' if guarded else '"none"'
    return [
        "import os, openai" if guarded else "import openai",
        "client = openai.OpenAI(",
        f'    base_url="{url}/v1", api_key={key})',
        f'question = "{QUESTION}"',
        "answer = client.chat.completions.create(",
        f"    model={json.dumps(model)}, max_tokens=16,",
        '    messages=[{"role": "user", "content": question}])',
        "print(answer.choices[0].message.content, answer.usage)",
    ]


def authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
