"""How published models split a text before its bytes are merged: by regular expressions, one after the other."""

from collections.abc import Mapping

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from tests.api.trained import LLAMA_SPLIT, QWEN_SPLIT

SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
QWEN35_SPLIT = QWEN_SPLIT.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def cased(numbers: str, short: str) -> str:
    """Words end where capitals begin."""
    before = r"[^\r\n\p{L}\p{N}]?"
    return f"{before}{UPPER}*{LOWER}+{short}|{before}{UPPER}+{LOWER}*{short}|{numbers}|{REST}"


DEEPSEEK_SPLITS = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def splits(*patterns: str) -> pre_tokenizers.PreTokenizer:
    by_bytes = ByteLevel(add_prefix_space=False, use_regex=False)
    return Sequence([*(Split(Regex(pattern), behavior="isolated") for pattern in patterns), by_bytes])


STYLES: Mapping[str, pre_tokenizers.PreTokenizer] = {
    "gpt2": ByteLevel(add_prefix_space=False),
    "llama3": splits(LLAMA_SPLIT),
    "qwen": splits(QWEN_SPLIT),
    "qwen3.5": splits(QWEN35_SPLIT),
    "gpt-oss": splits(cased(r"\p{N}{1,3}", f"{SHORT}?")),
    "mistral-nemo": splits(cased(r"\p{N}", "")),
    "deepseek": splits(*DEEPSEEK_SPLITS),
}
