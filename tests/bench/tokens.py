"""Measure prompt making from bodies: approximate, exact, and with earlier messages cached.

The tokenizer is byte-level BPE, trained here on this repository's text; it cuts words as Qwen's does.
"""

import json
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, trainers
from tokenizers.pre_tokenizers import ByteLevel

from api.openai.requests import ChatRequest, read
from api.prompts.prompts import Prompts
from api.tokens.tokenizer import HfTokenizer
from events.blocks import block_keys
from router.placement.index import Approximate, PrefixIndex
from router.prompts.prompt import APPROXIMATE, approximate, read_peek
from router.prompts.tokens import Tokens
from tests.api.chat_templates import TEMPLATES
from tests.api.tokenizers import saved
from tests.api.trained import QWEN_SPLIT, _split
from tests.bench.measure import cpu_us, heading, row
from tests.house import PACKAGES, ROOT

VOCAB_SIZE = 16_000
BLOCK = 16
TURNS = 20
MESSAGE_BYTES = 400  # 20 turns of two messages: 16 KB
CONVERSATIONS = 5
REPEATS = 200


def run(rounds: int) -> None:
    paths = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    words = " ".join(path.read_text() for path in paths).split(" ")
    chance = random.Random(1)
    bodies = {
        "1 message of 800 bytes": body([said(words, chance, 800)]),
        "16 KB in one message": body([said(words, chance, 16_000)]),
        "16 KB in 39 messages": body(conversation(words, chance)),
    }
    heading("parsing a body, and approximate keys; CPU per request")
    for name, sent in bodies.items():
        approximately(name, sent, rounds)
    routing(rounds)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = HfTokenizer(saved(trained(words), Path(folder)))
    encoders(tokenizer, words, rounds)
    for style, ends in (("qwen", {}), ("llama3", {"bos_token": "<|im_start|>"})):
        tokenizer.special_tokens = ends
        prompts = Prompts(tokenizer, TEMPLATES[style])
        print()
        heading(f"exact prompts, a vocabulary of {tokenizer.vocab_size:,}, a template like {style}'s; CPU per request")
        for name, sent in bodies.items():
            exactly(name, prompts, sent, rounds)
        growing(prompts, words, chance, rounds)


def said(words: Sequence[str], chance: random.Random, size: int) -> str:
    start = chance.randrange(len(words) - size)
    return " ".join(words[start : start + size])[:size]


def conversation(words: Sequence[str], chance: random.Random) -> list[str]:
    return [said(words, chance, MESSAGE_BYTES) for _ in range(2 * TURNS - 1)]


def body(contents: Sequence[str]) -> bytes:
    messages = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    fields: dict[str, Any] = {"model": "m", "messages": messages, "stream": True, "max_tokens": 128}
    return json.dumps(fields, ensure_ascii=False).encode()


def trained(words: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _split(QWEN_SPLIT)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([" ".join(words)], trainer)
    headers = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *headers])
    return tokenizer


def repeated(work: Callable[[], object], rounds: int, repeats: int = REPEATS) -> list[float]:
    def all_of_it() -> None:
        for _ in range(repeats):
            work()

    return cpu_us(lambda: all_of_it, repeats, rounds)


def approximately(name: str, sent: bytes, rounds: int) -> None:
    peek = read_peek(sent)
    row(f"{name}: reading it", repeated(lambda: read_peek(sent), rounds), "us")
    keys = repeated(lambda: approximate("m", peek, None, None, "").keys(APPROXIMATE), rounds)
    row(f"{name}: approximate keys", keys, "us", "<= 15")


def routing(rounds: int) -> None:
    """64 new blocks a prompt, in a full cache."""
    index = PrefixIndex()
    slot, routed = index.add(), Approximate(index)
    prompts = [[random.getrandbits(64) for _ in range(64)] for _ in range(1000)]

    def work() -> None:
        for keys in prompts:
            routed.routed(slot, keys)

    work()
    row("recording 64 blocks as routed, forgetting 64", cpu_us(lambda: work, len(prompts), rounds), "us")


def encoders(tokenizer: HfTokenizer, words: Sequence[str], rounds: int) -> None:
    """Encode texts that were never seen, of words that mostly were."""
    print()
    heading("encoding new text; CPU per text")
    assert tokenizer.is_fast, "fastokens reads this tokenizer"
    text = " ".join(words)
    for size, count in ((800, 200), (16_000, 10)):
        found = [
            cpu_us(new_texts(encode, text, size, count), count, rounds)
            for encode in (tokenizer._tokenizer.encode, tokenizer._encoder.encode)
        ]
        row(f"{size:,} characters: tokenizers", found[0], "us")
        row(f"{size:,} characters: fastokens, compared once in a while", found[1], "us")
        row("ratio", [one / other for one, other in zip(*found, strict=True)], "times")


def new_texts(encode: Callable[..., object], text: str, size: int, count: int) -> Callable[[], Callable[[], None]]:
    """Encode so many parts of a text, in each round others."""
    starts = iter(range(0, len(text) - size * count, size * count))

    def prepared() -> Callable[[], None]:
        first = next(starts)
        texts = [text[start : start + size] for start in range(first, first + size * count, size)]

        def all_of_it() -> None:
            for each in texts:
                encode(each, add_special_tokens=False)

        return all_of_it

    return prepared


def exactly(name: str, prompts: Prompts, sent: bytes, rounds: int) -> None:
    peek, asked = read_peek(sent), read(sent, ChatRequest)
    tokens, without = Tokens("m", prompts, compare_every=10**9), uncached(prompts)
    row(f"{name}: checking it", repeated(lambda: read(sent, ChatRequest), rounds), "us")
    row(f"{name}: rendering it", repeated(lambda: prompts.render(asked), rounds, 50), "us")
    row(f"{name}: all of it, no cache", repeated(lambda: without.draft("chat", sent, peek).finish(), rounds, 10), "us")
    row(f"{name}: all of it, known", repeated(lambda: tokens.draft("chat", sent, peek).finish(), rounds, 50), "us")
    made = tokens.draft("chat", sent, peek).finish()
    keys = repeated(lambda: block_keys(made.packed[0], BLOCK, 1), rounds)
    row(f"{name}: the keys of its {made.tokens:,} tokens", keys, "us")


def uncached(prompts: Prompts) -> Tokens:
    tokens = Tokens("m", prompts)
    tokens.cache = None
    return tokens


def growing(prompts: Prompts, words: Sequence[str], chance: random.Random, rounds: int) -> None:
    """Mean over the turns of a conversation that grows to 16 KB; each turn sends the whole history."""

    def of(tokens: Tokens) -> Callable[[], Callable[[], object]]:
        def prepared() -> Callable[[], object]:
            talks = [conversation(words, chance) for _ in range(CONVERSATIONS)]
            sent = [body(talk[: 2 * turn + 1]) for talk in talks for turn in range(TURNS)]
            asked = [(one, read_peek(one)) for one in sent]
            return lambda: [tokens.draft("chat", one, peek).finish() for one, peek in asked]

        return prepared

    for name, tokens in (("no cache", uncached(prompts)), ("cached", Tokens("m", prompts))):
        row(
            f"{TURNS} turns growing to 16 KB, a mean request: {name}",
            cpu_us(of(tokens), TURNS * CONVERSATIONS, rounds),
            "us",
        )
