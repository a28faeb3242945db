"""The tokenizer made of a GGUF gives the tokens of the model's own, and of what transformers makes of the same file."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from api.tokens.tokenizer import HfTokenizer
from tests.late import transformers
from tests.replica import smollm2
from tests.replica.model.gguf.files import CONTROL, NORMAL, USER_DEFINED, folder_of, gguf_of
from tests.replica.models import VOCABULARY

ROOT = Path(__file__).resolve().parents[4]
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = (
    "The Director's 3 colleagues' books: 12,345 pages, 1985-2024.\n\n\tThey'll  ask   why.   ",
    "Größere Städte haben schöne Bäume, und 20 % der Straßen führen ans Ufer.",
    "L'été où il naquit, l'œuvre coûtait 100 francs; aujourd'hui c'est l'inverse.",
    "El niño comió ocho manzanas. ¿Cuántas quedan? ¡Ninguna!",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "東京都は日本の首都であり、人口は約1400万人です。2024年7月。",
    "我能吞下玻璃而不伤身体。他说好的。",
    "다람쥐 헌 쳇바퀴에 타고파. 안녕하세요?",
    "النص العربي من اليمين إلى اليسار ١٢٣",
    "यह हिन्दी में एक वाक्य है।",
    "def f(x: int) -> list[int]:\n    return [x ** 2 for _ in range(10)]  # squares\r\n\r\n",
    "SELECT a.id, COUNT(*) FROM t AS a WHERE a.x >= 3.14e-2 GROUP BY 1;\n",
    "👩\u200d👧 🏳️\u200d🌈 e\u0301 ﬁ ½ \ufeff\x00\x7f\u00a0.",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|> <s> </s> <0x0A> ▁ [INST]",
    "",
    " ",
    "\n \n",
)


@cache
def texts() -> list[str]:
    files = (
        "README.md",
        "docs/kubernetes.md",
        "replica/engine/scheduler.py",
        "router/dashboard/static/js/pages/playground.js",
    )
    return [*TEXTS, *((ROOT / file).read_text() for file in files)]


def theirs(file: Path, alone: Path) -> Any:
    """Return the tokenizer that transformers makes of the same file, without one of ours beside it."""
    alone.mkdir()
    (alone / file.name).symlink_to(file)
    return transformers.AutoTokenizer.from_pretrained(alone, gguf_file=file.name)


def assert_same(ours: HfTokenizer, known: Any) -> None:
    """`known`: of transformers."""
    for text in texts():
        for special in (False, True):
            token_ids = known.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == token_ids, text[:80]
        assert ours.decode(token_ids) == known.decode(token_ids, skip_special_tokens=True)


# ---- a published one


@pytest.mark.grid  # transformers takes its time to read the file
def test_smollm2_has_the_tokens_that_transformers_gives_it(tmp_path: Path) -> None:
    """But transformers does not know the smollm of tokenizer.ggml.pre, and leaves digits together."""
    file = smollm2.folder() / "model.gguf"
    ours, known = HfTokenizer(folder_of(file, tmp_path / "folder")), theirs(file, tmp_path / "theirs")
    plain = "Any text without digits, über alles — `code()`,   too.\n"
    assert ours.encode(plain, add_special_tokens=False) == known.encode(plain, add_special_tokens=False)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    known.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte_level])
    assert_same(ours, known)
    assert [ours.decode([token_id]) for token_id in ours.encode(" 1985", add_special_tokens=False)] == list(" 1985")
    assert ours.is_fast and ours.joins_bytes
    assert ours.eos_token_ids == (2,)
    assert ours.chat_template == known.chat_template


# ---- other kinds, learnt here


def learnt(split: str, normalizer: Any = None, *, ignore_merges: bool = False) -> Tokenizer:
    """A byte-level tokenizer as models have it, trained on the texts."""
    tokenizer = Tokenizer(BPE(ignore_merges=ignore_merges))
    tokenizer.normalizer = normalizer
    pieces = pre_tokenizers.Split(Regex(split), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=VOCABULARY - 5, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts(), trainer)
    special = ("<|end|>", "<|begin_of▁text|>", "<unused>")
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "a b")])
    return tokenizer


def metadata_of(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    """As llama.cpp's converter writes them."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = dict(sorted((number, token) for token, number in tokenizer.get_vocab(with_added_tokens=True).items()))
    added = tokenizer.get_added_tokens_decoder()
    kinds = [NORMAL if number not in added else CONTROL if added[number].special else USER_DEFINED for number in tokens]
    return {
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": list(tokens.values()),
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.eos_token_id": tokenizer.token_to_id("<|end|>"),
        "tokenizer.ggml.bos_token_id": tokenizer.token_to_id("<|begin_of▁text|>"),
    }


@pytest.mark.parametrize(
    ("name", "pre", "digits", "normalizer"),
    [("llama", "llama-bpe", "{1,3}", None), ("qwen2", "qwen2", "", normalizers.NFC())],
)
def test_a_byte_level_tokenizer_is_the_models_own(
    name: str, pre: str, digits: str, normalizer: Any, tmp_path: Path
) -> None:
    own = learnt(WORDS.replace("DIGITS", digits), normalizer, ignore_merges=pre == "llama-bpe")
    ours = HfTokenizer(folder_of(gguf_of(name, tmp_path, metadata_of(own, pre)), tmp_path / "folder"))
    for text in texts():
        token_ids = own.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == token_ids
        assert ours.decode(token_ids) == own.decode(token_ids)
    bos = [own.token_to_id("<|begin_of▁text|>")] if pre == "llama-bpe" else []
    assert ours.encode("Hi", add_special_tokens=True) == bos + own.encode("Hi", add_special_tokens=False).ids
    assert ours.special_tokens["eos_token"] == "<|end|>"
    assert ours.special_texts == ("<|end|>", "<|begin_of▁text|>", "<unused>")


def test_the_ends_that_a_file_asks_for_are_added(tmp_path: Path) -> None:
    ends = {
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
    }
    ours = HfTokenizer(folder_of(gguf_of("llama", tmp_path, ends), tmp_path / "folder"))
    assert ours.encode("ab", add_special_tokens=True) == [0, 256, VOCABULARY - 1]
    assert ours.encode("ab", add_special_tokens=False) == [256]


def test_templates_with_names_are_kept(tmp_path: Path) -> None:
    changes = {"tokenizer.chat_template": "one", "tokenizer.chat_template.tool_use": "two"}
    ours = HfTokenizer(folder_of(gguf_of("llama", tmp_path, changes), tmp_path / "folder"))
    assert (ours.chat_template, ours.tool_chat_template) == ("one", "two")
