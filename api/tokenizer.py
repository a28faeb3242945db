"""Text to token ids and back: by bytes, or by a `tokenizer.json`. Safe to use from several threads."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as Tokenizers

from api.bounds import max_bytes_per_token
from api.pieces import byte_level, piece_rule

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


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
    def special_tokens(self) -> Mapping[str, str]:
        """`bos_token`, `eos_token` and so on, as chat templates know them."""

    @property
    def chat_template(self) -> str | None:
        """None: it has none, or (bytes) one that no string can express."""

    @property
    def tool_chat_template(self) -> str | None:
        """The template to use instead where tools are given; None: the same one."""

    @property
    def joins_bytes(self) -> bool:
        """Whether the text of a sequence is the bytes of its tokens, joined (but for a space at the beginning)."""

    @property
    def max_bytes_per_token(self) -> int:
        """How many bytes of a text one token stands for at most; `api.bounds` says how far this can be trusted."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token stands for in the middle of a text; none for an id that does not exist."""


class ByteTokenizer:
    """Ids 0 to 255 are bytes, and the special tokens follow. No text, whatever it says, encodes to a special token."""

    name = "bytes"
    specials = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
    bos, eos, im_start, im_end = range(256, 260)
    vocab_size = 260
    eos_token_ids: tuple[int, ...] = (eos, im_end)
    special_token_ids = frozenset((bos, eos, im_start, im_end))
    special_tokens: Mapping[str, str] = {"bos_token": specials[0], "eos_token": specials[1]}
    chat_template: str | None = None
    tool_chat_template: str | None = None
    joins_bytes = True
    max_bytes_per_token = 1

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
    """A `tokenizer.json`, and what the files beside it say of special tokens and the chat template."""

    def __init__(self, path: str | Path) -> None:
        file = _tokenizer_file(Path(path))
        self.name = str(path)
        self._tokenizer = _loaded(file)
        # Set once: changing them while another thread encodes is an error in `tokenizers`.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self._read_folder(file.parent)
        self._rule = piece_rule(_decoder(self._tokenizer))
        self.joins_bytes = self._rule is not None
        self.max_bytes_per_token = max_bytes_per_token(self._tokenizer)
        # Added tokens are plain text ("é!" added to a byte-level model is not 0xE9 and "!"), unless the model has them.
        known = self._tokenizer.get_vocab(with_added_tokens=False)
        self._plain = {
            i: token.content for i, token in added.items() if self._rule is byte_level and token.content not in known
        }
        self._pieces: dict[int, bytes] = {}  # filled as tokens are met

    def _read_folder(self, folder: Path) -> None:
        config = _read_json(folder / "tokenizer_config.json")
        self.special_tokens: Mapping[str, str] = _special_tokens(
            _read_json(folder / "special_tokens_map.json") | config
        )
        generation = _read_json(folder / "generation_config.json")
        model = _read_json(folder / "config.json")
        self.eos_token_ids = self._eos(generation.get("eos_token_id", model.get("eos_token_id")))
        self.chat_template, self.tool_chat_template = _chat_templates(folder, config.get("chat_template"))

    def _eos(self, also: Any) -> tuple[int, ...]:
        named = self._tokenizer.token_to_id(self.special_tokens.get("eos_token", ""))
        others = also if isinstance(also, list) else [also]
        return tuple(dict.fromkeys(i for i in (named, *others) if isinstance(i, int)))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._piece(token_id)
        return piece

    def _piece(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.vocab_size:
            return b""
        if token_id in self._plain:
            return self._plain[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        return self._rule(token) if self._rule else self.decode([token_id], skip_special_tokens=False).encode()


def _decoder(tokenizer: Tokenizers) -> dict[str, Any] | None:
    """As it stands in the file. (Its pickle; all of `tokenizer.to_str()` is 17 MB for a large vocabulary.)"""
    decoder = tokenizer.decoder
    return None if decoder is None else json.loads(decoder.__getstate__())


def load_tokenizer(path: str | Path | None) -> Tokenizer:
    """The tokenizer of a model's folder or of a `tokenizer.json`; None: bytes."""
    return ByteTokenizer() if path is None else HfTokenizer(path)


def _tokenizer_file(path: Path) -> Path:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{file} does not exist; name a tokenizer.json, or a folder that has one")
    return file


def _loaded(file: Path) -> Tokenizers:
    try:
        return Tokenizers.from_file(str(file))
    except Exception as error:  # it raises nothing more exact
        raise ValueError(f"{file} is not a tokenizer: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}; it must be an object")
    return content


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Each token stands there as a string or as an object with its content."""
    found = {name: config.get(name) for name in SPECIAL_TOKENS}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not a chat template: it is not UTF-8 ({error.reason})") from error


def _chat_templates(folder: Path, configured: Any) -> tuple[str | None, str | None]:
    """The template, and the one to use with tools. A file of its own wins over the configuration."""
    if (file := folder / "chat_template.jinja").is_file():
        return read_template(file), None
    configured = _read_json(folder / "chat_template.json").get("chat_template", configured)
    if isinstance(configured, str):
        return configured, None
    named = _by_name(configured if isinstance(configured, list) else ())
    return named.get("default"), named.get("tool_use")


def _by_name(templates: Iterable[Any]) -> dict[str, str]:
    return {entry["name"]: entry["template"] for entry in templates if isinstance(entry, dict)}
