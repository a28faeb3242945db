"""Text to token ids and back: by bytes, or with a `tokenizer.json`. Thread-safe."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as Tokenizers

from api.model_files import MAX_TEMPLATE_BYTES, MAX_TOKENIZER_BYTES, check_size, read_model_file, read_object
from api.tokens.bounds import max_bytes_per_token
from api.tokens.cuts import safe_cuts
from api.tokens.encoder import Encoder
from api.tokens.pieces import byte_level, piece_rule

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TOKEN_IDS = 2**31  # more than any vocabulary has, and no more than a message takes


class Tokenizer(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def special_token_ids(self) -> frozenset[int]: ...
    @property
    def special_texts(self) -> tuple[str, ...]:
        """Texts that `encode` turns into special tokens."""

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """`bos_token`, `eos_token` and so on, by their names in chat templates."""

    @property
    def chat_template(self) -> str | None:
        """The chat template; None: there is none, or (bytes) no string can express it."""

    @property
    def tool_chat_template(self) -> str | None:
        """The template to use with tools; None: the same one."""

    @property
    def joins_bytes(self) -> bool:
        """Tell whether a sequence's text is the concatenation of its tokens' bytes (except for a leading space)."""

    @property
    def max_bytes_per_token(self) -> int:
        """The most bytes of text that one token stands for; `api.tokens.bounds` says how reliable this is."""

    @property
    def is_fast(self) -> bool:
        """Tell whether texts are encoded in microseconds for each kilobyte, not in half milliseconds."""

    @property
    def cuts(self) -> tuple[str, ...]:
        """Tokens at which a text may be cut so that its pieces have the tokens of the whole (`api.tokens.cuts`)."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...
    def token_bytes(self, token_id: int) -> bytes:
        """The token's bytes in the middle of a text; empty for an id that does not exist."""


class ByteTokenizer:
    """Ids 0 to 255 are bytes, followed by special tokens. No text encodes to a special token."""

    name = "bytes"
    specials = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
    bos, eos, im_start, im_end = range(256, 260)
    vocab_size = 260
    eos_token_ids: tuple[int, ...] = (eos, im_end)
    special_token_ids = frozenset((bos, eos, im_start, im_end))
    special_texts: tuple[str, ...] = ()
    special_tokens: Mapping[str, str] = {"bos_token": specials[0], "eos_token": specials[1]}
    chat_template: str | None = None
    tool_chat_template: str | None = None
    joins_bytes = True
    max_bytes_per_token = 1
    is_fast = True
    cuts: tuple[str, ...] = ()

    _pieces = (*(bytes([byte]) for byte in range(256)), *(token.encode() for token in specials))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        token_ids = list(text.encode())
        return [self.bos, *token_ids] if add_special_tokens else token_ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        end = 256 if skip_special_tokens else self.vocab_size
        return b"".join(self._pieces[i] for i in token_ids if 0 <= i < end).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id] if 0 <= token_id < self.vocab_size else b""


class HfTokenizer:
    """A `tokenizer.json`, with the special tokens and the chat template from the files beside it."""

    def __init__(self, path: str | Path) -> None:
        file = Path(path, "tokenizer.json") if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise ValueError(f"{file} does not exist; name a tokenizer.json, or a folder with one")
        self.name = str(path)
        config = _read_json(file.parent / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # else it lists all tokens, and wins over the older file
            config |= _read_json(file.parent / "special_tokens_map.json")
        self.special_tokens: Mapping[str, str] = _special_tokens(config)
        # Set once: changing it while another thread encodes is an error in `tokenizers`.
        check_size(file, MAX_TOKENIZER_BYTES)
        try:
            self._tokenizer = Tokenizers.from_file(str(file))
        except Exception as error:  # `tokenizers` raises nothing more exact
            raise ValueError(f"{file} is not a tokenizer: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        new = _add_tokens(self._tokenizer, config, self.special_tokens)
        self._encoder = Encoder(self._tokenizer, file, new)
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        added = self._tokenizer.get_added_tokens_decoder()
        self.cuts: tuple[str, ...] = safe_cuts(added.values())
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self.special_texts: tuple[str, ...] = tuple(token.content for token in added.values() if token.special)
        end = self._tokenizer.token_to_id(self.special_tokens.get("eos_token", ""))
        ends = eos_token_ids(file.parent)
        self.eos_token_ids = tuple(dict.fromkeys(ends if end is None else (end, *ends)))
        self.chat_template, self.tool_chat_template = _chat_templates(file.parent, config.get("chat_template"))
        decoder = self._tokenizer.decoder
        self._rule = piece_rule(None if decoder is None else json.loads(decoder.__getstate__()))
        self.joins_bytes = self._rule is not None
        self.max_bytes_per_token = max_bytes_per_token(self._tokenizer)
        # Added tokens are plain text ("é!" added to a byte-level model is not 0xE9 and "!"), unless the model has them.
        known = self._tokenizer.get_vocab(with_added_tokens=False)
        self._plain = {
            i: token.content for i, token in added.items() if self._rule is byte_level and token.content not in known
        }
        self._pieces: dict[int, bytes] = {}  # filled as tokens are met

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._encoder.encode(text, add_special_tokens=add_special_tokens)

    @property
    def is_fast(self) -> bool:
        return self._encoder.is_fast

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = b""
            if token_id in self._plain:
                piece = self._plain[token_id].encode()
            elif 0 <= token_id < self.vocab_size and (token := self._tokenizer.id_to_token(token_id)) is not None:
                piece = self._rule(token) if self._rule else self.decode([token_id], skip_special_tokens=False).encode()
            self._pieces[token_id] = piece
        return piece


def load_tokenizer(path: str | Path | None) -> Tokenizer:
    """The tokenizer of a model's folder or of a `tokenizer.json`; None: bytes."""
    return ByteTokenizer() if path is None else HfTokenizer(path)


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    generation, model = (_read_json(folder / name) for name in ("generation_config.json", "config.json"))
    named = generation.get("eos_token_id", model.get("eos_token_id"))
    named = named if isinstance(named, list) else [named]
    # Some files say -1 for none.
    return tuple(i for i in named if isinstance(i, int) and not isinstance(i, bool) and 0 <= i < TOKEN_IDS)


def _read_json(file: Path) -> dict[str, Any]:
    return read_object(file) if file.is_file() else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name: the usual ones, then those of this model (`image_token`)."""
    extra = config.get("extra_special_tokens")
    own = {name: token for name, token in config.items() if name.endswith("_token") and name not in SPECIAL_TOKENS}
    named = {name: config.get(name) for name in SPECIAL_TOKENS} | own | (extra if isinstance(extra, dict) else {})
    texts = {name: _content(token) for name, token in named.items()}
    return {name: text for name, text in texts.items() if text is not None}


def _content(token: Any) -> str | None:
    """The text of a token, given as a string or as an object with its content."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _add_tokens(tokenizer: Tokenizers, config: Mapping[str, Any], named: Mapping[str, str]) -> list[str]:
    """Add the special tokens that only other files name, with the next ids, as transformers does; return them."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    others = map(_content, extra if isinstance(extra, list) else ())
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    new = dict.fromkeys(token for token in (*named.values(), *others) if token is not None and token not in known)
    tokenizer.add_special_tokens(list(new))
    return list(new)


def read_template(file: Path) -> str:
    try:
        return read_model_file(file, MAX_TEMPLATE_BYTES)
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not a chat template: it is not UTF-8 ({error.reason})") from error


def _chat_templates(folder: Path, configured: Any) -> tuple[str | None, str | None]:
    """The template, and the one for tools. A separate file overrides the configuration."""
    if (file := folder / "chat_template.jinja").is_file():
        with_tools = folder / "additional_chat_templates" / "tool_use.jinja"
        return read_template(file), read_template(with_tools) if with_tools.is_file() else None
    configured = _read_json(folder / "chat_template.json").get("chat_template", configured)
    if isinstance(configured, str):
        return configured, None
    entries = configured if isinstance(configured, list) else ()
    named: dict[str, str] = {entry["name"]: entry["template"] for entry in entries if isinstance(entry, dict)}
    return named.get("default"), named.get("tool_use")
