"""The message of `warmroute up` when all replicas are ready: what runs where, and how to send a request."""

import json
import shlex
from collections.abc import Sequence

from fleet.commands.view import View
from fleet.plan import FleetPlan
from replica.model.locate import DEMO, SMOLLM2

QUESTION = "Name the capital of France."
SIMULATED = (
    "The engine is simulated: its text is made up and its time is a clock's,",
    "but batching, caching and the events about it are real.",
)
OF_MODELS = {
    DEMO: (
        "The demo model is small and was never trained, so it babbles; the engine,",
        "cache and server are those of every model.",
    ),
    SMOLLM2: (
        "smollm2 is SmolLM2-135M-Instruct: small enough for any machine, so it answers",
        "simple questions, and is often wrong about others.",
    ),
}


def remarks_on(plan: FleetPlan) -> Sequence[str]:
    if all(model.engine == "simulated" for model in plan.models):
        return SIMULATED
    return OF_MODELS.get(plan.models[0].name, ()) if len(plan.models) == 1 else ()


def announcement(url: str, view: View, remarks: Sequence[str], guarded: bool) -> str:
    """Lines that fit into 80 columns where host and model are short."""
    names = [model.name for model in view.models]
    who = [f"{model.ready} replica{'s' * (model.ready != 1)} of {model.name}" for model in view.models]
    lines = ["", f"{_listed(who)} {'answer' if who[1:] or view.models[0].ready != 1 else 'answers'} at {url}"]
    lines += [f"and can be watched at {url}/dashboard", ""]
    for model in names:
        lines += [f"  {each.name}  {each.url}  events {each.events or 'off'}" for each in view.of(model)]
    lines += ["", *remarks] if remarks else []
    lines += ["", "Ask twice: the second answer comes from a warm cache (cached_tokens).", ""]
    served = view.models[0].serves or names[0]
    lines += [f"  {line}" for line in curl(served, url, guarded)]
    lines += ["", "Or from Python, after `pip install openai`:", ""]
    lines += [f"  {line}" for line in python(served, url, guarded)]
    return "\n".join([*lines, ""])


def _listed(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


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
