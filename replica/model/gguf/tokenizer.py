"""The byte-level BPE tokenizer that a GGUF's metadata describe.

Where transformers reads less of them (the single digits of SmolLM2, the NFC of Qwen), the model's own
tokenizer.json decides.
"""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from replica.model.gguf.header import Header, Scalar

TOKENS = "tokenizer.ggml.tokens"
NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
CONTROL, USER_DEFINED = 3, 4  # types of tokens: those that a text is cut at
FOLDER_INSTEAD = "name a folder in Hugging Face's layout instead, which has a tokenizer.json"
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# These cut a text before the merges, by llama.cpp's names: GPT-2's own regular expression, or one of these.
LLAMA3, QWEN2 = ("llama-bpe", "llama3", "llama-v3"), ("qwen2",)
SPLITS = dict.fromkeys(LLAMA3, WORDS.replace("DIGITS", "{1,3}")) | dict.fromkeys(QWEN2, WORDS.replace("DIGITS", ""))
GPT2, SINGLE_DIGITS = ("default", "gpt-2"), ("smollm",)


def build_tokenizer(header: Header) -> Tokenizer:
    """ValueError for a kind that is not supported, and for metadata that contradict themselves."""
    kind = header.scalar("tokenizer.ggml.model")
    if kind != "gpt2":
        raise header.refused(f"tokenizer.ggml.model is {kind!r:.80}; only gpt2 works: {FOLDER_INSTEAD}")
    types = header.numbers("tokenizer.ggml.token_type", len(header.strings(TOKENS)))
    named = [token for name in NAMED if (token := _named(header, name)) is not None]
    try:
        tokenizer = _byte_level(header)
        special = [token for token, type in zip(header.strings(TOKENS), types, strict=True) if type == CONTROL]
        tokenizer.add_special_tokens(
            [AddedToken(token, normalized=False, special=True) for token in dict.fromkeys([*special, *named])]
        )
        plain = [token for token, type in zip(header.strings(TOKENS), types, strict=True) if type == USER_DEFINED]
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])
        tokenizer.post_processor = _ends(header)
    except ValueError:
        raise
    except Exception as error:  # the library raises plain Exceptions for what a file may have wrong
        raise header.refused(f"its tokenizer cannot be built: {error!r:.200}; get the file again") from error
    return tokenizer


def tokenizer_config(header: Header) -> dict[str, Any]:
    key = "tokenizer.chat_template"
    template: Scalar | list[dict[str, Scalar | None]] | None = header.scalar(key)
    if others := [name for name in header.metadata if name.startswith(f"{key}.")]:  # several, by their names
        named = {"default": header.scalar(key)} | {name[len(key) + 1 :]: header.scalar(name) for name in others}
        template = [{"name": name, "template": each} for name, each in named.items()]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _adds_bos(header),
        "add_eos_token": _adds_eos(header),
        "chat_template": template,
    } | {name: _named(header, name) for name in NAMED}
    return {name: value for name, value in config.items() if value is not None}


def _named(header: Header, name: str) -> str | None:
    token_id, tokens = header.scalar(f"tokenizer.ggml.{NAMED[name]}_token_id"), header.strings(TOKENS)
    if token_id is None:
        return None
    if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        raise header.refused(f"its {name} is {token_id!r:.80}, which none of its {len(tokens)} tokens is; get it again")
    return tokens[token_id]


def _pre(header: Header) -> Scalar | None:
    return header.scalar("tokenizer.ggml.pre")


def _adds_bos(header: Header) -> bool:
    """Unless the file says it, as llama.cpp does."""
    return bool(header.scalar("tokenizer.ggml.add_bos_token", _pre(header) in LLAMA3))


def _adds_eos(header: Header) -> bool:
    return bool(header.scalar("tokenizer.ggml.add_eos_token", False))


def _ends(header: Header) -> processors.TemplateProcessing | None:
    bos = _named(header, "bos_token") if _adds_bos(header) else None
    eos = _named(header, "eos_token") if _adds_eos(header) else None
    ids = {token: header.strings(TOKENS).index(token) for token in (bos, eos) if token is not None}
    if not ids:
        return None

    def one(text: str, number: int) -> list[str]:
        return [f"{piece}:{number}" for piece in (bos, text, eos) if piece is not None]

    return processors.TemplateProcessing(
        single=one("$A", 0), pair=one("$A", 0) + one("$B", 1), special_tokens=list(ids.items())
    )


def _byte_level(header: Header) -> Tokenizer:
    pre = _pre(header)
    supported = (*GPT2, *SINGLE_DIGITS, *SPLITS)
    if pre not in supported:
        raise header.refused(f"tokenizer.ggml.pre is {pre!r:.80}; only {', '.join(supported)} work: {FOLDER_INSTEAD}")
    halves = (merge.partition(" ") for merge in header.strings("tokenizer.ggml.merges"))
    merges = [(left, right) for left, _, right in halves]
    vocabulary = {token: number for number, token in enumerate(header.strings(TOKENS))}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in LLAMA3))
    if pre in SPLITS:
        split = pre_tokenizers.Split(Regex(SPLITS[str(pre)]), behavior="isolated")
        steps = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    else:
        digits = [pre_tokenizers.Digits(individual_digits=True)] if pre in SINGLE_DIGITS else []
        steps = [*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.normalizer = normalizers.NFC() if pre in QWEN2 else None
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
