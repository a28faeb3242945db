"""Print what `warmroute prove` says of routers of several makes, in turn in front of the same two real vLLM."""

import tempfile
from contextlib import ExitStack
from pathlib import Path

from qualification.engines.engine import MODEL, Engine, missing, ready
from tests.bench.prove import heading, present, row
from tests.chaos.routers import router

REQUESTS, BLOCKS = 150, 400
# Else sglang-router waits for vLLM's /server_info, which looks at the whole machine, and gives up after 10 s.
USUAL = {"VLLM_SERVER_DEV_MODE": "0"}


def main(folder: Path, stack: ExitStack) -> None:
    others, before = present(), 0
    engines = [Engine(folder / f"{name}.jsonl", USUAL, (), blocks=BLOCKS) for name in ("r0", "r1")]
    for one in engines:
        stack.enter_context(ready(one))
    replicas = [text for one in engines for text in ("--replica", f"url={one.url},engine=vllm")]
    options = (*replicas, "--model-dir", f"{MODEL}={engines[0].folder / 'model'}")
    heading(f"{REQUESTS} requests, 2 vLLM of {BLOCKS * 16:,} tokens")
    for peer in (None, *others):
        name = "warmroute, cost" if peer is None else peer.name
        with router(*options) if peer is None else peer.started([one.url for one in engines]) as front:
            row(name, front.url, *options, "--requests", REQUESTS)
        last = {found.admit: found.tokens for one in engines for found in one.all_found() if not found.preempted}
        hits = sum(last.values())
        print(f"(cached by the engines' own logs: {hits - before:,})", flush=True)
        before = hits


if __name__ == "__main__":
    if why := missing():
        raise SystemExit(why)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        main(Path(folder), stack)
