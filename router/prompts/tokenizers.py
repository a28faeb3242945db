"""Finds the tokenizer of each model. One that is not known to be the model's own is never used for it."""

import logging
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from weakref import WeakValueDictionary

from api.prompts.prompts import Prompts
from api.tokens.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, read_template
from engines import profile_of
from router.prompts.tokens import Tokens

log = logging.getLogger(__name__)

ANY_TOKEN_ID = 2**31  # the model's vocabulary may be larger than its tokenizer's; the replica knows
NEWEST = 8  # models


class Tokenizers:
    """The `Tokens` of every model and engine, made when its first replica reports its models.

    They live as long as a replica serves the model; the newest few live longer, so that all replicas may restart.
    """

    def __init__(self, folders: Mapping[str, str], templates: Mapping[str, str], cache_bytes: int) -> None:
        """Load folders and template files, by model; raise OSError or ValueError if one cannot be read."""
        self._known: WeakValueDictionary[tuple[str, str, str | None], Tokens] = WeakValueDictionary()
        self._newest: deque[Tokens] = deque(maxlen=NEWEST)
        self._folders = folders
        self._templates = {model: (path, read_template(Path(path))) for model, path in templates.items()}
        self._cache_bytes = cache_bytes
        self._read = {folder: load_tokenizer(folder) for folder in folders.values()}

    def of(self, model: str, engine: str = "", tokenizer: str | None = None) -> Tokens:
        """The model's `Tokens`: `engine` is the one whose prompts are followed, `tokenizer` what a replica reports."""
        about = model, engine, tokenizer
        tokens = self._known.get(about)
        if tokens is None:
            strict = profile_of(engine).takes_envelope
            # The folder given for the model; else one given as `--model-dir DIR` that has its name, or is the only one.
            unnamed = [folder for name, folder in self._folders.items() if name == folder]
            alike = [folder for folder in unnamed if Path(folder).name == model.rpartition("/")[2]]
            folder = self._folders.get(model) or next(iter(alike), None)
            if folder is None and len(self._folders) == 1 and unnamed:
                folder = unnamed[0]
            found: Tokenizer | None = None
            if folder is not None:
                found = self._read[folder]
            elif tokenizer == ByteTokenizer.name:
                found = ByteTokenizer()
            if found is None:
                tokens = Tokens(model, None, cache_bytes=self._cache_bytes, strict=strict, engine=engine)
                what = "asking its replicas for tokens" if tokens.question else "matching its prompts approximately"
                log.warning("%s: no tokenizer, %s; give its folder with --model-dir", model, what)
            else:
                path, template = self._templates.get(model, ("", None))
                name = path or "the chat template"
                prompts = Prompts(found, template, ANY_TOKEN_ID, name)
                tokens = Tokens(model, prompts, cache_bytes=self._cache_bytes, strict=strict, engine=engine)
            self._known[about] = tokens
            self._newest.append(tokens)
        return tokens
