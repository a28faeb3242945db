"""Ages, rates, tokens and text as the tools write them."""

from collections.abc import Callable, Sequence
from unicodedata import category

from events.analysis.tree import Namespace, Node, ancestors, token_ids
from events.blocks import ExtraKey

Decode = Callable[[list[int]], str]

TOKENS_SHOWN = 64


def seconds(value: float | None) -> str:
    """`850 us`, `1.2 ms`, `3.4 s`, `2.5 min`, `3.1 h`; `?` for None."""
    if value is None:
        return "?"
    for unit, factor, limit in (("us", 1e-6, 1e-3), ("ms", 1e-3, 1.0), ("s", 1.0, 90.0), ("min", 60.0, 5400.0)):
        if abs(value) < limit:
            return f"{number(value / factor)} {unit}"
    return f"{number(value / 3600)} h"


def number(value: float) -> str:
    """Three digits, as many as anybody reads: `0.25`, `12.5`, `1,230`."""
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2g}" if abs(value) < 0.995 else f"{value:.2f}"


def content(packed: bytes, decode: Decode | None, extras: Sequence[ExtraKey] = ()) -> str:
    """The beginning of a run in one line: its text if there is a tokenizer, else its token ids; then its images.

    An image is written `image cat…@3`: the id, cut, and where it begins, counted from the start of its block.
    """
    ids = list(token_ids(packed[: 4 * TOKENS_SHOWN]))
    if decode is not None:
        shown = [quoted(decode(ids))]
    else:
        shown = [f"[{' '.join(map(str, ids[:12]))}{' …' if len(packed) > 48 else ''}]" if ids else "(tokens unknown)"]
    for extra in extras[:3]:
        if isinstance(extra, bytes):
            shown.append(f"embedding {extra.hex()[:8]}")
        else:
            shown.append(f"image {printable(extra[0][:12])}@{extra[1]}")
    return " ".join([*shown, f"and {len(extras) - 3} more"] if len(extras) > 3 else shown)


def restrictions(namespace: Namespace) -> list[str]:
    """The conditions that keep other prompts out of a namespace."""
    named = (("salt", namespace.cache_salt), ("LoRA", namespace.lora_name))
    return [f"{what} {quoted(name)}" for what, name in named if name is not None]


def place(node: Node) -> str:
    """A block's place in the tree: `block 12, salt "x"`."""
    *blocks, top = ancestors(node)
    within = [f"below {top.key:016x}"] if top.namespace is None else restrictions(top.namespace)
    return ", ".join([f"block {len(blocks) - 1}", *within])


def quoted(text: str) -> str:
    return f'"{printable(text)}"'


def printable(text: str) -> str:
    """Text that cannot move the cursor, colour the terminal or break the line."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def printable_lines(text: str) -> str:
    """Text of several lines, as `printable` shows one; tabs, spaces of any width and joined emoji stay as they are."""
    return "".join(char if char in "\n\t\u200d" or category(char) == "Zs" else printable(char) for char in text)
