"""Text to token ids by a `tokenizer.json`: by fastokens where it gives what tokenizers gives, which takes far longer.

tokenizers is right by definition. fastokens reads most byte-level BPE models, and refuses the others. It is compared
before it is used, then once in a while, and never used again after a difference.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from fastokens import Tokenizer as Fastokens
from tokenizers import AddedToken, Tokenizer

log = logging.getLogger(__name__)

LONG_TEXT = 4096  # characters; a longer text is encoded without holding up Python's other threads
COMPARE_EVERY = 1000  # one text in this many is also encoded by tokenizers
DIFFERS = "fastokens encodes a text differently"
STRIDE = 613  # the distance of the code points that are compared at the start
MAX_ADDED = 32  # added tokens that are compared at the start: this many of the first, and of the last

# One text at a time is encoded: a pool of threads in each process would only take its memory.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")

_SAMPLES = (
    "You're 12345 times TOO loud, I'LL say!!\r\n\r\n  def f(x):\n\treturn {'a': [1, 2.5e-3]}  # done\n\n\n   ",
    "Größe 東京都\u3000へ 안녕하세요 Жизнь\u00a0Дня نص עברית हिन्दी ไทย e\u0301 ﬁ ½ Å ￼ \ufeff \u180e\u202e \x00\x7f",
    "👩\u200d👧 🏳️\u200d🌈 \U0001d518\U0001d52b \U0001f468\U0001f3fd\ue000 \U000f0000 <|im_start|> </s> [INST] ▁ <0x0A>",
    "",
    " ",
    "\n",
    " a",
    "a ",
)


class Encoder:
    """Encodes texts; safe to use from several threads."""

    def __init__(self, tokenizers: Tokenizer, file: Path, added: Sequence[str] = ()) -> None:
        """`added`: special tokens that `tokenizers` has beyond the file's own."""
        self._tokenizers = tokenizers
        self._name = str(file)
        self._until_compared = COMPARE_EVERY
        self._fast: Fastokens | None = None
        self.why_not_fast: str | None = None
        texts = list(_samples(list(tokenizers.get_added_tokens_decoder().values())))
        try:
            fast = Fastokens.from_file(str(file))
            fast.no_truncation()
            fast.no_padding()
            fast.add_tokens([AddedToken(token, special=True, normalized=False) for token in added])
            if self._agree(fast, texts, special=False) and self._agree(fast, texts[:1], special=True):
                self._fast = fast
                return
            self.why_not_fast = DIFFERS
        except ValueError as error:  # it cannot read the file, or encode one of the texts
            self.why_not_fast = f"fastokens: {error}"
        log.info("%s: encoding by tokenizers: %s", file, self.why_not_fast)

    @property
    def is_fast(self) -> bool:
        return self._fast is not None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        fast = self._fast
        if fast is None:
            return self._encoded_by_tokenizers(text, add_special_tokens)
        try:
            ids: list[int] = fast.encode(text, add_special_tokens).ids
        except ValueError:  # a text that is no UTF-8, or one that takes its patterns too long
            return self._encoded_by_tokenizers(text, add_special_tokens)
        self._until_compared -= 1
        if self._until_compared <= 0:
            self._until_compared = COMPARE_EVERY
            right = self._encoded_by_tokenizers(text, add_special_tokens)
            if ids != right:
                self._fast = None
                if self.why_not_fast is None:  # no other thread has found it at the same time
                    self.why_not_fast = DIFFERS
                    log.error("%s: %s, first seen in one of %d characters", self._name, DIFFERS, len(text))
                return right
        return ids

    def _encoded_by_tokenizers(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) < LONG_TEXT:
            return self._tokenizers.encode(text, add_special_tokens=add_special_tokens).ids
        # It is `encode`, but lets go of the interpreter, and leaves out the offsets.
        [encoding] = self._tokenizers.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def _agree(self, fast: Fastokens, texts: Sequence[str], *, special: bool) -> bool:
        return all(fast.encode(text, special).ids == self._encoded_by_tokenizers(text, special) for text in texts)


def _samples(added: Sequence[AddedToken]) -> Iterator[str]:
    """Texts that would show most differences: scripts, white space, rare characters, and added tokens between words."""
    yield from _SAMPLES
    yield "".join(f"a{chr(point)}b {chr(point)} 1{chr(point)}\n" for point in range(1, 0xD800, STRIDE))
    yield "".join(f"a{chr(point)}b {chr(point)} 1{chr(point)}\n" for point in range(0xE000, 0x110000, STRIDE))
    compared = added if len(added) <= 2 * MAX_ADDED else [*added[:MAX_ADDED], *added[-MAX_ADDED:]]
    for token in compared:
        text = token.content
        yield f"a{text}b {text} \n{text}{text[:-1]}{text}1 {text.upper()}{text[1:]}"
    yield " ".join(token.content for token in compared)
