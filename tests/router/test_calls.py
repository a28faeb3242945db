"""The way of a request through the router is short: what it passes is counted, and the number may only be lowered."""

from pathlib import Path

from tests.bench.front import PLAIN, STREAM, FrontOnWires, bodies
from tests.bench.measure import OURS, calls

CALLS = {False: 180, True: 264}  # of functions of ours, from a client's first byte to its last; with 16 events
FILES = 35  # of router/


async def test_a_warm_chat_passes_few_functions_and_files() -> None:
    for stream, most in CALLS.items():
        front = FrontOnWires()
        try:
            answer = STREAM if stream else [PLAIN]
            passed: list[list[str]] = []
            for body in bodies(800, stream, 0)[:30]:
                with calls() as made:
                    front.ask(body, answer)
                passed.append([file for file in made if any(map(Path(file).is_relative_to, OURS))])
        finally:
            await front.close()
        ours = min(passed, key=len)  # others pass what is due now and then, such as a tick of the clock
        assert len(ours) <= most, f"{len(ours)} calls"
        files = {file for file in ours if Path(file).is_relative_to(OURS[-1])}
        assert len(files) <= FILES, f"{len(files)} files"
