"""Measure llama.cpp on one thread at the lengths of `tests.bench.lengths`: `python tests/bench/llama_cpp.py FILE.gguf`.

Speeds are by llama.cpp's own clock, so nothing may run beside it. It needs only `xllamacpp`, in an environment of its
own (`pip install xllamacpp`), and the GGUF file of SmolLM2-135M.
"""

import random
import statistics
import sys
from typing import Any

from xllamacpp import CommonParams, Server

LENGTHS, STEPS, ROUNDS = (54, 954, 4615), 16, 2


def main(file: str) -> None:
    params = CommonParams()
    params.model.path = file
    params.n_ctx, params.n_parallel, params.n_gpu_layers = 8192, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = Server(params)
    print("| a prompt of | prefill, tok/s (lowest) | decoding, tok/s (lowest) |\n| --- | --- | --- |")
    for length in LENGTHS:
        rates = [measured(server, length, seed) for seed in range(ROUNDS)]
        told = [f"**{statistics.median(found):,.3g}** ({min(found):,.3g})" for found in zip(*rates, strict=True)]
        print(f"| {length:,} tokens | {' | '.join(told)} |", flush=True)


def measured(server: Any, length: int, seed: int) -> tuple[float, float]:
    prompt = [random.Random(seed).randrange(1000, 40_000) for _ in range(length)]
    asked = {"prompt": prompt, "n_predict": STEPS + 1, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
    timings = server.handle_completions(asked)["timings"]
    return timings["prompt_per_second"], timings["predicted_per_second"]


if __name__ == "__main__":
    main(sys.argv[1])
