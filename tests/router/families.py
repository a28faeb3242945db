"""Tokenizers of the families that models have, each with a template, as the router gets them."""

from functools import cache
from pathlib import Path

from api.prompts.prompts import Prompts
from api.tokens.tokenizer import HfTokenizer
from tests.api.chat_templates import TEMPLATES
from tests.api.tokenizers import saved
from tests.api.trained import FAMILIES

ENDS = {
    "gpt2": ("<|endoftext|>", "<|endoftext|>"),
    "qwen": (None, "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
}
OWN_TEMPLATE = {"qwen": "qwen", "llama3": "llama3", "mistral": "mistral"}


@cache
def prompts(family: str, folder: Path) -> Prompts:
    folder = folder / f"router_{family}"
    folder.mkdir(exist_ok=True)
    bos, eos = ENDS.get(family, ("<s>", "</s>"))
    tokenizer = HfTokenizer(saved(FAMILIES[family](), folder, tokenizer_config={"bos_token": bos, "eos_token": eos}))
    return Prompts(tokenizer, TEMPLATES[OWN_TEMPLATE.get(family, "other")])
