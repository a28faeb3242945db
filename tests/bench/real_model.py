"""The idea on a real model: `warmroute up` with two replicas of SmolLM2, asked cold and warm, and by typical traffic.

It takes some seven minutes on two cores, most of them for computing cold prompts, and draws docs/cold-and-warm.svg.
Prompts are texts of this repository; those of the traffic are made by `warmroute bench`, whose answers are cut: what is
cached does not depend on them.
"""

import json
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.bench.drawing import drawing
from tests.bench.fleet import up

MODEL = "smollm2"
LENGTHS = (512, 2000, 4000, 7500)
TIMES = 3
DOCS = Path(__file__).parents[2] / "docs"
# Requests of each kind, enough for a cache to fill; and the share of the input that others report as cached.
TRAFFIC = {
    "chatbot": (60, "92 to 97 %"),
    "multi-turn": (60, "80 to 95 %"),
    "rag": (60, "25 to 40 %"),
    "code": (60, "15 to 35 %"),
    "batch": (60, "8 to 15 %"),
    "random": (60, "0 to 2 %"),
}
ANSWER_TOKENS = 8


def run(rounds: int) -> None:
    del rounds
    with up("--no-ray", "--model", MODEL, "--replicas", "2") as (_, url, _):
        print("| prompt, tokens | first token, cold | cached | times |\n| --- | --- | --- | --- |")
        text = "\n\n".join(page.read_text() for page in sorted(DOCS.glob("*.md")))
        words = text.split(" ")
        found = []
        for length in LENGTHS:
            cold, warm = _asked(url, words, length)
            found.append((cold, warm))
            print(f"| {length:,} | {_spoken(cold)} | {_spoken(warm)} | {cold / warm:.0f} |", flush=True)
        _draw(found)
        print("\n| traffic | requests | cached | reported by others | first token, mean |")
        print("| --- | --- | --- | --- | --- |")
        for kind, (requests, reported) in TRAFFIC.items():
            figures = _sent(url, kind, requests)
            cached, ttft_s = figures["hit_rate"], figures["ttft_s"]["mean"]
            print(f"| {kind} | {requests} | **{cached:.1%}** | {reported} | {_spoken(ttft_s)} |", flush=True)
    print()


def _asked(url: str, words: list[str], length: int) -> tuple[float, float]:
    """The median times to first token of prompts that no replica knows, and of the same ones once more."""
    cold, warm = [], []
    for number in range(TIMES):
        prompt = _of_length(url, words[number * 20_000 :], length)
        cold.append(_first_token_s(url, prompt))
        warm.append(_first_token_s(url, prompt))
    return statistics.median(cold), statistics.median(warm)


def _draw(found: list[tuple[float, float]]) -> None:
    title = "SmolLM2-135M on two cores: time to the first token"
    with drawing(DOCS / "cold-and-warm.svg", title=title, x="tokens in the prompt", y="seconds") as axes:
        for name, times, colour in zip(
            ("cold", "cached"), zip(*found, strict=True), ("#4477aa", "#ee6677"), strict=True
        ):
            axes.plot(LENGTHS, times, "o-", label=name, color=colour)
            for length, seconds in zip(LENGTHS, times, strict=True):
                offset = {"textcoords": "offset points", "xytext": (0, 8), "ha": "center"}
                axes.annotate(_spoken(seconds), (length, seconds), **offset)
        axes.set_ylim(bottom=0)


def _of_length(url: str, words: list[str], length: int) -> list[int]:
    """Token ids, so that the length is exact."""
    return list(_posted(url, "/tokenize", {"model": MODEL, "prompt": " ".join(words[:length])})["tokens"][:length])


def _first_token_s(url: str, prompt: list[int]) -> float:
    fields = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "stream": True}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(fields).encode())
    began_s = time.monotonic()
    with urllib.request.urlopen(request, timeout=300) as answer:
        answer.readline()
        first_s = time.monotonic() - began_s
        answer.read()
    return first_s


def _posted(url: str, path: str, fields: dict[str, Any]) -> Any:
    with urllib.request.urlopen(urllib.request.Request(url + path, json.dumps(fields).encode()), timeout=60) as answer:
        return json.load(answer)


def _sent(url: str, kind: str, requests: int) -> Any:
    options = f"--workload {kind} --requests {requests} --concurrency 2 --max-tokens {ANSWER_TOKENS} --for 600"
    options += " --think 0" if kind == "multi-turn" else ""
    command = [sys.executable, "-m", "fleet", "bench", url, *options.split(), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)["endpoints"][0]["figures"]


def _spoken(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1000:.0f} ms"
