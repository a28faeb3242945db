"""`python -m tests.bench.flame FILE.svg`: the functions that a warm chat passes in the front, as a flame graph.

A function is as wide as the instructions of the interpreter that it and those under it take, which do not vary; what
they call of C counts as one. For another checkout: `PYTHONPATH=FOLDER python tests/bench/flame.py FILE.svg`.
"""

import argparse
import asyncio
import logging
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from types import FrameType
from typing import Any

from tests.bench.front import PLAIN, STREAM, FrontOnWires, bodies

WIDTH, LINE, LETTER = 1200, 17, 6.1  # pixels
WARM, LOOKED_AT = 200, 20  # requests
COLOURS = ("#f2c14e", "#f78154", "#9fd8cb", "#b4b8ab", "#8fb8de", "#d4a5e0", "#c5d86d", "#e6b89c")


class Call:
    def __init__(self, name: str, folder: str) -> None:
        self.name, self.folder = name, folder
        self.instructions = 0  # with those of its calls, once it is over
        self.calls: list[Call] = []

    def rows(self, depth: int = 0, start: int = 0) -> Iterator[tuple["Call", int, int]]:
        yield self, depth, start
        for call in self.calls:
            yield from call.rows(depth + 1, start)
            start += call.instructions

    def __len__(self) -> int:
        return 1 + sum(map(len, self.calls))


def traced(front: FrontOnWires, body: bytes, answer: list[bytes]) -> Call:
    whole = Call("a request", "")
    stack = [whole]

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if event == "call":
            code, frame.f_trace_opcodes, frame.f_trace_lines = frame.f_code, True, False
            path = Path(code.co_filename)
            stack[-1].calls.append(Call(code.co_qualname, f"{path.parent.parent.name}/{path.parent.name}"))
            stack.append(stack[-1].calls[-1])
        elif event == "opcode":
            stack[-1].instructions += 1
        elif event == "return":
            over = stack.pop()
            over.instructions += sum(call.instructions for call in over.calls)
        return trace

    sys.settrace(trace)
    front.ask(body, answer)
    sys.settrace(None)
    # What only the wires do is none of the request.
    [asked] = [call for call in whole.calls if call.name == "FrontOnWires.ask"]
    whole.calls = [call for call in asked.calls if call.name.endswith("data_received")]
    whole.instructions = sum(call.instructions for call in whole.calls)
    return whole


async def least(*, stream: bool) -> Call:
    front = FrontOnWires()
    try:
        asked, answer = bodies(800, stream, 0), STREAM if stream else [PLAIN]
        for body in asked[:WARM]:
            front.ask(body, answer)
        found = [traced(front, body, answer) for body in asked[WARM:][:LOOKED_AT]]
        return min(found, key=lambda each: each.instructions)
    finally:
        await front.close()


def svg(whole: Call) -> str:
    rows = list(whole.rows())
    folders = sorted({call.folder for call, _, _ in rows})
    height, scale = LINE * (2 + max(depth for _, depth, _ in rows)), WIDTH / whole.instructions
    head = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
    parts = [f'<svg {head} font-family="monospace" font-size="10">']
    for call, depth, start in rows:
        x, y, width = start * scale, depth * LINE, call.instructions * scale
        told = f"{call.name}: {call.instructions:,} instructions, {len(call) - (not depth):,} calls"
        colour = COLOURS[folders.index(call.folder) % len(COLOURS)]
        box = f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LINE - 1}" fill="{colour}" stroke="#fff"/>'
        name = told if not depth else call.name.rpartition(".")[2] if "<locals>" not in call.name else ""
        shown = name[: int((width - 4) / LETTER)]
        text = f'<text x="{x + 2:.1f}" y="{y + 12}">{escape(shown)}</text>' if len(shown) > 3 else ""
        parts.append(f"<g><title>{escape(told)}</title>{box}{text}</g>")
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.bench.flame", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--stream", action="store_true", help="answered by 16 events")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    found = asyncio.run(least(stream=args.stream))
    args.file.write_text(svg(found))
    print(f"{args.file}: {found.instructions:,} instructions, {len(found) - 1:,} calls")
