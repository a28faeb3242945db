"""Builds the request for a prompt from a reading process, and the Prompt from its response."""

import struct

from api.tokens.tokenizer import ByteTokenizer
from router.members.members import ServedModel
from router.prompts.prompt import APPROXIMATE, BYTES_PER_TOKEN, Peek, Prompt
from router.prompts.reading.messages import Made, Make
from router.prompts.tokens import TokenCounts

# Longer than any known model. For a model of unknown length, a longer prompt is matched approximately.
LONGEST_TOKENS = 2**24


def make_for(model: ServedModel, api: str, salt: str | None) -> Make:
    tokens = model.tokens
    prompts = None if tokens.why_not is not None else tokens.prompts
    return Make(
        model=tokens.model,
        api=api,
        tokenizer=None if prompts is None else "" if is_bytes(prompts.tokenizer) else prompts.tokenizer.name,
        template=None if prompts is None else prompts.given_template,
        template_name="" if prompts is None else prompts.template_name,
        vocab_size=0 if prompts is None else prompts.vocab_size,
        special_tokens_in_text="parse" if prompts is None else prompts.special_tokens_in_text,
        strict=tokens.strict,
        lora=model.lora,
        salt=salt,
        max_model_len=model.max_model_len or LONGEST_TOKENS,
        why_not=tokens.why_not,
        with_text=APPROXIMATE in model.slots,
        engine="" if tokens.engine is None else tokens.engine.name,
        native=model.is_ours,
    )


def is_bytes(tokenizer: object) -> bool:
    return isinstance(tokenizer, ByteTokenizer)


def prompt_from(
    made: Made, model: ServedModel, peek: Peek, salt: str | None, counts: TokenCounts | None = None
) -> Prompt:
    """The prompt; `peek` is updated to describe the body that replicas get. `counts`: by default the model's."""
    tokens = model.tokens
    why, doubt = tokens.verdict(made.shape, peek, made.dated_s, read_apart=True) if made.exact else (made.why_not, None)
    if made.exact and (why or doubt):
        made.counts.exact -= 1
        made.counts.approximate["shape" if why else "unverified"] += 1
    (counts or tokens.counts).add(made.counts)
    peek.prompt = made.beginning
    if made.salted:
        peek.cache_salt = salt
    keys = made.text_keys
    exact = made.exact and why is None
    length = made.tokens if exact or not made.exact else max(1, (made.text_bytes or 0) // BYTES_PER_TOKEN)
    return Prompt(
        model=tokens.model,
        tokens=length,
        packed=made.packed if exact else [],
        exact=exact,
        why_not=why,
        choices=made.choices,
        lora=model.lora,
        salt=salt,
        peek=peek,
        _keys={} if keys is None else {APPROXIMATE: list(struct.unpack(f"<{len(keys) // 8}Q", keys))},
        _text_bytes=made.text_bytes,
        read_apart=True,
        shape=made.shape,
        unverified=made.packed[0] if made.exact and not exact else None,
        doubt=doubt or made.doubt,
        retain=made.retain if exact else [],
        dated_s=made.dated_s,
        all_tokens=length + made.further_tokens,
    )
