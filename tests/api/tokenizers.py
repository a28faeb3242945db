"""Small tokenizers of the kinds that models have, made on the spot."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from api.tokens.tokenizer import HfTokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog. The quick brown fox sleeps.",
    "naïve café — “quotes” … 東京は日本の首都です。 안녕하세요 Привет мир",
    "😀 👩‍👩‍👧‍👦 🏳️‍🌈 é é ä̈ \u200d\ufeff\n\t  two  spaces",
]
BYTE_TOKENS = {f"<0x{byte:02X}>": byte for byte in range(256)}


def byte_level() -> Tokenizer:
    """As Llama 3, Qwen and GPT-2 have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(
        [
            AddedToken("café au lait", normalized=False),
            AddedToken("é!", normalized=False),
        ]
    )
    return tokenizer


def sentencepiece(*, strip: bool = True) -> Tokenizer:
    """As Llama 2, Mistral and Gemma have it: `▁` for a space, and bytes for what is not in the vocabulary."""
    words = ["▁", "▁the", "▁a", "the", "e", "h", "t", "a", "東", "é", "▁▁"]
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *BYTE_TOKENS, *words])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def word_pieces() -> Tokenizer:
    """Its decoder looks at the tokens around, as no byte rule can."""
    vocab = {token: i for i, token in enumerate(["[UNK]", "the", "##re", "fox", "##es", ",", "東", "##�", "."])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    tokenizer.add_special_tokens(["[UNK]"])
    return tokenizer


def metaspace() -> Tokenizer:
    vocab = [("<unk>", 0.0), ("▁fox", -1.0), ("es", -1.0), ("▁", -2.0), ("é", -2.0)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=False))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def saved(tokenizer: Tokenizer, folder: Path, **files: Any) -> Path:
    """The tokenizer as a model's folder, with JSON files beside it (`tokenizer_config={...}`)."""
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@cache
def loaded(kind: str, folder: Path) -> HfTokenizer:
    folder = folder / kind
    folder.mkdir(exist_ok=True)
    return HfTokenizer(saved(KINDS[kind](), folder))


KINDS = {
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "word_pieces": word_pieces,
    "metaspace": metaspace,
}
