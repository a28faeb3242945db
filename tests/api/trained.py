"""Tokenizers of the families that models have, trained on a small text: vocabularies that really split and merge."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers.pre_tokenizers import ByteLevel, Metaspace, Split

from tests.api.tokenizers import BYTE_TOKENS, TEXTS

VOCAB_SIZE = 420
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_SPLIT = QWEN_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
SENTENCEPIECE_SPECIALS = ["<unk>", "<s>", "</s>"]
TEXT = [*TEXTS, "you're 12345 times TOO loud!!\r\n\r\n  def f(x):\n\treturn {'a': [1, 2]}", "e\u0301 ﬁ ½ Å ￼ \u202e نص"]


def gpt2() -> Tokenizer:
    tokenizer = _byte_level(ByteLevel(add_prefix_space=False))
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def qwen() -> Tokenizer:
    tokenizer = _byte_level(_split(QWEN_SPLIT), normalizers.NFC())
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    plain = ("<tool_call>", "</tool_call>", "<think>", "</think>")  # decoded even where special tokens are skipped
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in plain])
    return tokenizer


def llama3() -> Tokenizer:
    """As it is made of a tiktoken file: whole words of the vocabulary are taken before any merge."""
    tokenizer = _byte_level(_split(LLAMA_SPLIT), ignore_merges=True)
    headers = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"]
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", *headers])
    by_bytes = processors.ByteLevel(trim_offsets=True)
    tokenizer.post_processor = processors.Sequence([by_bytes, _begins_with("<|begin_of_text|>", tokenizer)])
    return tokenizer


def llama2() -> Tokenizer:
    """As it was converted of old: a normalizer writes the spaces, and no text is cut before the merges."""
    tokenizer = Tokenizer(_byte_fallback_bpe())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _sentencepiece(tokenizer)


def mistral() -> Tokenizer:
    """As it is converted now: spaces come from a pre-tokenizer, which begins only the first piece with one."""
    tokenizer = Tokenizer(_byte_fallback_bpe())
    tokenizer.pre_tokenizer = Metaspace(prepend_scheme="first", split=False)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"])
    tokenizer.add_special_tokens(["[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"])
    return _sentencepiece(tokenizer)


def unigram() -> Tokenizer:
    """A SentencePiece model that is not BPE. Without bytes: any unknown text is one unknown token."""
    tokenizer = _trained_unigram()
    tokenizer.decoder = decoders.Metaspace()
    return _with_sentencepiece_specials(tokenizer)


def unigram_bytes() -> Tokenizer:
    trained: dict[str, Any] = json.loads(_trained_unigram().to_str())
    known = [(token, score) for token, score in trained["model"]["vocab"] if token not in SENTENCEPIECE_SPECIALS]
    vocab = [(token, 0.0) for token in (*SENTENCEPIECE_SPECIALS, *BYTE_TOKENS)] + known
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = Metaspace(prepend_scheme="always")
    return _sentencepiece(tokenizer)


FAMILIES: Mapping[str, Callable[[], Tokenizer]] = {
    make.__name__: make for make in (gpt2, qwen, llama3, llama2, mistral, unigram, unigram_bytes)
}


def _byte_level(pre_tokenizer: Any, normalizer: Any = None, *, ignore_merges: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, initial_alphabet=ByteLevel.alphabet(), show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def _split(pattern: str) -> pre_tokenizers.Sequence:
    by_bytes = ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([Split(Regex(pattern), behavior="isolated"), by_bytes])


def _byte_fallback_bpe() -> models.BPE:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = Metaspace()
    trained.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    tokens = [*SENTENCEPIECE_SPECIALS, *BYTE_TOKENS, *model["vocab"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [(left, right) for left, right in model["merges"]]
    return models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)


def _trained_unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=300, show_progress=False, unk_token="<unk>", special_tokens=SENTENCEPIECE_SPECIALS
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def _sentencepiece(tokenizer: Tokenizer) -> Tokenizer:
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return _with_sentencepiece_specials(tokenizer)


def _with_sentencepiece_specials(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens(SENTENCEPIECE_SPECIALS)
    tokenizer.post_processor = _begins_with("<s>", tokenizer)
    return tokenizer


def _begins_with(token: str, tokenizer: Tokenizer) -> processors.TemplateProcessing:
    begin = (token, tokenizer.token_to_id(token))
    return processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token}:1 $B:1", special_tokens=[begin]
    )
