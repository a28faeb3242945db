"""From the whole body of a request to its prompt, which is made at once, on a thread or in another process.

A generation is read whole. What only engines answer is passed on as it came; a conversation among it is read as far as
the router places it by its prompt. Such a body is a JSON object or a form, and nothing that an engine reads in another
way than the router (decision 0048).
"""

import asyncio
import struct
from functools import partial
from itertools import islice
from urllib.parse import parse_qs

from api.errors import ApiError, invalid, quoted
from api.generation_apis import APIS, CHAT, RESPONSES, GenerationApi
from api.openai_responses.named import NamedResponses, may_name, named_in
from api.reading import media_type
from api.tokens.tokenizer import ByteTokenizer
from router.members.members import ServedModel
from router.prompts.model_rewrites import rewritten
from router.prompts.prompt import (
    APPROXIMATE,
    BYTES_PER_TOKEN,
    MAX_TEXT_BYTES,
    UNREADABLE,
    Peek,
    Prompt,
    approximate,
    by_text,
    forget_others,
    object_salted,
    peek_of,
    read_peek,
)
from router.prompts.reading.client import QUICK_BODY_BYTES, is_quick
from router.prompts.reading.messages import Found, Made, Make, Salt
from router.prompts.tokens import QUICK_APPROXIMATE_BYTES
from router.proxy.exchange import Exchange
from router.proxy.headers import JSON_LINE, value_of
from router.proxy.request import Request
from router.proxy.responses import Made as MadeResponse
from router.proxy.responses import checked
from router.proxy.withheld import FORM, check_form, peek_unless_withheld, withhold

# Longer than any known model. For a model of unknown length, a longer prompt is matched approximately.
LONGEST_TOKENS = 2**24
MAX_NAMES = 10  # the names that an error lists


def rewrite(request: Request, exchange: Exchange) -> None:
    """Begin with the whole body, for the model that the request gets by the rules."""
    rules = request.router.model_rewrites
    if not rules.is_empty:
        if not is_quick(exchange.body):
            request.aside(partial(_rewrite_apart, request, exchange))
            return
        try:
            exchange.replace_body(rewritten(rules, exchange.body))
        except ApiError as error:
            request.refuse(error)
            return
    read(request, exchange)


async def _rewrite_apart(request: Request, exchange: Exchange) -> None:
    """Look into a large body on a thread, one at a time."""
    async with request.router.rewriting:
        body = await asyncio.to_thread(rewritten, request.router.model_rewrites, exchange.body)
    exchange.aside = None
    exchange.replace_body(body)
    read(request, exchange)


def read(request: Request, exchange: Exchange) -> None:
    api, router = request.type.generation, request.router
    if api is None and not request.flow.is_single:  # a gateway sends no envelope
        found = APIS.get(request.type.api)
        if found is not None and _is_for_ours(request, exchange):
            if found is RESPONSES and may_name(exchange.body):
                request.aside(partial(_join_conversation, request, found, exchange))
                return
            request.becomes(found)
            api = found
    body = request.body = exchange.take_body()
    request.came_s, request.redraft = router.now_s(), draft_generation
    request.flow.body()
    if api is not None and router.config.log_prompts:
        request.logged = bytes(body)
    try:
        if len(body) > QUICK_BODY_BYTES and not is_quick(body):
            apart = (
                partial(_read_opaque_apart, request) if api is None else partial(_read_generation_apart, request, api)
            )
            request.aside(apart)
        elif api is not None:
            peek = peek_unless_withheld(body)
            if peek is None:
                request.body, _, request.priority = withhold(body, request.withheld)
                peek = read_peek(request.body)
            draft_generation(request, api, peek)
        else:
            if body:
                request.body = _salted(request, _without_reserved(request, body))
            _find_holder_or_draft(request)
    except ApiError as error:
        request.refuse(error)


def _is_for_ours(request: Request, exchange: Exchange) -> bool:
    """Tell whether only replicas of ours can answer, which take any API as a generation."""
    members = request.router.members
    if all(model.is_ours for model in members.models.values()):
        return bool(members.models)
    if not is_quick(exchange.body):
        return False
    try:
        model = members.models.get(withhold(exchange.body, ())[1] or "")
    except ApiError:
        return False
    return model is not None and model.is_ours


# ---- a generation


def draft_generation(request: Request, api: GenerationApi, peek: Peek | None = None) -> None:
    """Make the prompt where that delays no other client; `peek`: the body's, which is quick to read."""
    body = request.body
    if peek is None and not is_quick(body):
        request.aside(partial(_read_generation_apart, request, api))
        return
    if peek is None or api is not CHAT or peek.prompt is not None:
        peek = peek_into(api, body, peek)
    model, key = request.reads(peek), request.admitted.key
    _draft(request, model, body, peek, peek.cache_salt if key is None else key.salted(peek.cache_salt))


def peek_into(api: GenerationApi, body: bytes, peek: Peek | None = None) -> Peek:
    """The fields that the router reads of this API's requests; `peek`: those that chats and completions have."""
    peek = peek or read_peek(body)
    if peek.prompt is not None or not api.is_chat:
        forget_others(peek, api)
    if api.inner is not None and (conversation := peek_of(api.name, body, peek.model)) is not None:
        peek.messages = conversation.messages  # and the fields that stand beside them there
    return peek


def _draft(request: Request, model: ServedModel, body: bytes, peek: Peek, salt: str | None) -> None:
    """Make the prompt: at once where that delays no other client, else on a thread."""
    tokens = model.tokens
    if tokens.why_not is not None and len(body) <= QUICK_APPROXIMATE_BYTES:
        request.prompted(approximate(tokens.model, peek, model.lora, salt, tokens.why_not, "model"))
        return
    draft = partial(tokens.draft, request.type.api, body, peek, model.lora, salt, model.max_model_len)
    if not tokens.is_quick(body):
        request.router.in_thread(lambda: draft().finish(), len(body), request.made)
        return
    drafted = draft()
    if drafted.is_quick:
        request.prompted(drafted.finish())
    else:
        request.router.in_thread(drafted.finish, len(body), request.made)


async def _read_generation_apart(request: Request, api: GenerationApi) -> None:
    """Have a large body read in another process."""
    salt: str | None = None
    before = request.prompt

    def want(found: Found) -> Make:
        nonlocal salt
        peek = Peek(**found.fields)
        # The body has its salt already if its prompt is made again.
        salt = before.salt if isinstance(before, Prompt) else request.admitted.cache_salt(peek.cache_salt)
        return make_for(request.reads(peek), api.name, salt)

    request.body, _, priority = await asyncio.to_thread(withhold, request.body, request.withheld)
    if not isinstance(before, Prompt):  # else its priority was taken out of the body then
        request.priority = priority
    made = await request.router.reading.read(request.body, want)
    request.exchange.aside = None
    assert made is not None and request.model is not None, "it was wanted"
    prompt = prompt_from(made, request.model, request.peek, salt)
    if made.body is not None:  # else it is unchanged
        request.body = made.body
    request.exchange.hold(len(request.body) + sum(map(len, prompt.packed)))
    request.prompted(prompt)


async def _join_conversation(request: Request, api: GenerationApi, exchange: Exchange) -> None:
    """Put the conversation of the previous response into the body: then any replica can go on with it."""
    named = await _named(request, exchange.body)
    made = {response_id: _checked(request, response_id, param) for response_id, param in named}
    # The newest of the responses that have the items has all of them in its conversation.
    for response_id, items in ((named.previous, "previous_items"), (named.newest, "referenced_items")):
        if response_id is not None:
            await request.router.responses.join(exchange, response_id, made[response_id], items)
    exchange.aside = None
    request.becomes(api)
    read(request, exchange)


async def _named(request: Request, body: bytes | bytearray) -> NamedResponses:
    if is_quick(body):
        try:
            return named_in(body)
        except UNREADABLE as error:
            found = Found({}, chat=False, error=str(error))
    else:
        found = await request.router.reading.found(body)
    if found.error is not None and request.router.admission.has_salts:
        raise invalid(f"the body is no JSON object that could be searched for responses: {found.error}")
    return found.named


def _checked(request: Request, response_id: str, param: str | None = None) -> MadeResponse | None:
    """Read the id of a response; raise ApiError 404 if the response may be another tenant's."""
    has_salts = request.router.admission.has_salts
    return checked(response_id, request.admitted.cache_salt(None), param, has_salts=has_salts)


# ---- what is passed on as it came


def _without_reserved(request: Request, body: bytes) -> bytes:
    """The body without fields that only routers set; raise ApiError 400 if it may have some that are not seen."""
    headers = request.exchange.scope["headers"]
    if media_type(headers) == FORM:
        content_type = value_of(headers, b"content-type") or b""
        check_form(content_type, body, request.withheld)
        request.type_line = b"content-type: %b\r\n" % content_type
    else:
        body, request.model_name, request.priority = withhold(body, request.withheld)
        request.type_line = JSON_LINE
    return body


async def _read_opaque_apart(request: Request) -> None:
    body = request.body = await asyncio.to_thread(_without_reserved, request, request.body)
    key = request.admitted.key
    if request.type_line is not JSON_LINE:
        request.body = _salted(request, body)
    elif key is not None and key.salt is not None:
        made = await request.router.reading.read(
            body, lambda found: Salt(key.salted(found.fields.get("cache_salt"))), whole=False
        )
        if made is not None and made.body is not None:
            request.body = made.body
    request.exchange.aside = None
    _find_holder_or_draft(request)


def _salted(request: Request, body: bytes) -> bytes:
    """The body with the key's salt; any path gets it, because any may use the engine's cache."""
    key = request.admitted.key
    if key is None or key.salt is None or not body:
        return body
    try:
        return object_salted(body, key.salted)
    except UNREADABLE as error:
        if request.type.caches:
            path = request.exchange.scope["path"]
            kept_apart = "this API key's cache is kept apart by a field of the body"
            why = f"{kept_apart}, and that of {path} is not a JSON object ({error})"
            raise invalid(f"{why}; send one, or use a key without a salt") from None
        return body


def _find_holder_or_draft(request: Request) -> None:
    if request.type.of_response or (request.type.api == RESPONSES.name and may_name(request.body)):
        request.aside(partial(_find_holder, request))
    else:
        _draft_opaque(request)


async def _find_holder(request: Request) -> None:
    """Find the replica that holds the response which the request is about, or continues."""
    wanted: str | None
    if request.type.of_response:
        response_id = request.exchange.scope["path"].split("/")[3]  # /v1/responses/ID, and perhaps /cancel
        wanted, made = response_id, {response_id: _checked(request, response_id)}
    else:
        named = await _named(request, request.body)
        made = {response_id: _checked(request, response_id, param) for response_id, param in named}
        wanted = named.previous or named.newest
    if wanted is not None:
        proof = made[wanted]
        for member in request.router.members:
            # Another engine keeps what it makes; a replica of ours may have gone on with another one's.
            is_there = not member.profile.takes_envelope and member.candidate.unavailable is None
            if proof is not None and proof.at(member.name) and is_there:
                request.holder = member.name
                break
        else:  # None: whichever gets the request says that it is gone
            request.holder = await request.router.responses.holder(wanted, proof)
    request.exchange.aside = None
    _draft_opaque(request)


def _draft_opaque(request: Request) -> None:
    router, api, body = request.router, request.type.api, request.body
    if request.type.query_names_model:
        models, query = router.members.models, request.exchange.scope["query_string"]
        named = parse_qs(query.decode("latin-1")).get("model")
        if not named and len(models) > 1:
            known = ", ".join(map(quoted, islice(models, MAX_NAMES)))
            raise invalid(f"there are several models, among them {known}; name one: ?model=NAME", "model")
        request.model_name = named[-1] if named else next(iter(models), None)
    name = request.model_name
    if not api or not body or name is None:
        request.prompted(None)
        return
    quick = peek_of(api, body, name) if is_quick(body) else None
    peek = quick or Peek(name)
    model = request.reads(peek)
    if quick is not None:
        _draft(request, model, body, quick, quick.cache_salt)
    else:
        request.prompted(by_text(model.tokens.model, peek, model.lora, body[:MAX_TEXT_BYTES]))


# ---- a prompt that another process has made


def make_for(model: ServedModel, api: str, salt: str | None) -> Make:
    tokens = model.tokens
    prompts = None if tokens.why_not is not None else tokens.prompts
    named = None if prompts is None else "" if isinstance(prompts.tokenizer, ByteTokenizer) else prompts.tokenizer.name
    return Make(
        model=tokens.model,
        api=api,
        tokenizer=named,
        template=None if prompts is None else prompts.given_template,
        template_name="" if prompts is None else prompts.template_name,
        vocab_size=0 if prompts is None else prompts.vocab_size,
        strict=tokens.strict,
        lora=model.lora,
        salt=salt,
        max_model_len=model.max_model_len or LONGEST_TOKENS,
        why_not=tokens.why_not,
        with_text=APPROXIMATE in model.slots,
        engine="" if tokens.engine is None else tokens.engine.name,
        native=model.is_ours,
        cuts=tokens.question is not None,
    )


def prompt_from(made: Made, model: ServedModel, peek: Peek, salt: str | None) -> Prompt:
    """The prompt; `peek` is updated to describe the body that replicas get."""
    tokens = model.tokens
    why, doubt = tokens.verdict(made.shape, peek, made.dated_s, read_apart=True) if made.exact else (made.why_not, None)
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
        cut=made.cut if made.cut is not None and is_quick(made.cut.body) else None,
        reason=("shape" if why else "unverified") if made.exact and (why or doubt) else made.reason,
    )
