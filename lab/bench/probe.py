"""Finds out how an endpoint can be asked, before anything is measured: its model, its fields, its tokens per word."""

from typing import Any, NamedTuple

import click
import msgspec
from msgspec import Struct

from api.process.settings import Unusable
from events.tool.words import printable
from lab.bench.client import Endpoint, Outcome, error_text
from lab.bench.prompts import DIALECTS, Form, Words
from lab.bench.workloads import Conversation, Passage, Turn
from router.members.broken import Broken
from router.members.spec import Target, parse_target

SHORT_WORDS, LONG_WORDS = 64, 448
UNKNOWN_FIELD = (400, 422)  # statuses for a field that an endpoint does not take
PATIENCE_S = 30.0  # a mute endpoint is better found out soon; --timeout is for long answers


class CannotAsk(click.ClickException):
    """Says why, and what to do."""


class Probe(Struct, frozen=True):
    """The first requests and their results; the endpoint's caches and counters have seen them."""

    model: str
    tokens_per_word: float
    is_measured: bool  # or assumed
    ignores_eos: bool
    tells_usage: bool
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


class RequestSettings(NamedTuple):
    model: str | None
    seed: str
    is_chat: bool = True


def target_of(url: str) -> Target:
    """Parse the endpoint's URL, with or without /v1 or a path of the API."""
    root = url.rstrip("/").removesuffix("/completions").removesuffix("/chat")
    try:
        return parse_target(root)
    except ValueError as error:
        raise Unusable(f"{url!r} is not the URL of an endpoint; write http://HOST:PORT or https://HOST:PORT") from error


async def probe(endpoint: Endpoint, wish: RequestSettings) -> tuple[Form, Probe]:
    timeout_s = endpoint.timeout_s
    endpoint.timeout_s = min(timeout_s, PATIENCE_S)
    try:
        model = wish.model or await only_model(endpoint, _patience(endpoint))
        form, short = await _understood(endpoint, Form(model, Words(f"probe {wish.seed}"), wish.is_chat))
        sent = [short]
        if short.prompt_tokens is not None:
            sent.append(await _sent(endpoint, form, LONG_WORDS))
    finally:
        endpoint.timeout_s = timeout_s
    measured = None  # two lengths are compared, so that a template's own tokens cancel out
    lengths = [outcome.prompt_tokens for outcome in sent if not outcome.error]
    if len(lengths) == 2 and lengths[0] is not None and lengths[1] is not None:
        measured = max(0.05, (lengths[1] - lengths[0]) / (LONG_WORDS - SHORT_WORDS))
    return form, Probe(
        model=model,
        tokens_per_word=measured or 1.0,
        is_measured=measured is not None,
        ignores_eos=form.dialect.ignore_eos,
        tells_usage=short.prompt_tokens is not None,
        requests=len(sent),
        prompt_tokens=sum(outcome.prompt_tokens or 0 for outcome in sent),
        cached_tokens=sum(outcome.cached_tokens or 0 for outcome in sent),
    )


async def only_model(endpoint: Endpoint, patience: str) -> str:
    """The model that is served; `patience` is said of an endpoint that is mute."""
    url = endpoint.target.url
    try:
        status, _, body = await endpoint.get("/v1/models")
    except Broken as error:
        why = f"timeout{patience}" if error.silent else f"{error}; is it started, and is that its address?"
        raise CannotAsk(f"{url} does not answer: {why}") from error
    if status != 200:
        fixes = {401: "give --api-key", 403: "give --api-key", 404: "is this the API's root? If so, give --model"}
        fix = fixes.get(status, "give --model")
        raise CannotAsk(f"{url}/v1/models answers with status {status}: {printable(error_text(body))}; {fix}")
    try:
        found: Any = msgspec.json.decode(body)
        models = [str(one["id"]) for one in found["data"]]
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise CannotAsk(f"{url}/v1/models does not answer with a list of models; give --model") from error
    if len(models) != 1:
        named = printable(", ".join(models[:8])) or "no model"
        raise CannotAsk(f"{url} serves {named}; choose with --model")
    return models[0]


async def _understood(endpoint: Endpoint, form: Form) -> tuple[Form, Outcome]:
    """The form in the first dialect that is not refused."""
    for dialect in DIALECTS:
        form = form._replace(dialect=dialect)
        outcome = await _sent(endpoint, form, SHORT_WORDS)
        if not outcome.error:
            return form, outcome
        if outcome.status not in UNKNOWN_FIELD:
            break
    fix = "; give --api-key" if outcome.status in (401, 403) else ""
    if outcome.error == "timeout":
        fix = _patience(endpoint)
    why = f"{outcome.error}: {outcome.detail}{fix}"
    raise CannotAsk(f"{endpoint.target.url} does not take a first request: {why}")


def _patience(endpoint: Endpoint) -> str:
    return (
        f", after {endpoint.timeout_s:g} s; is it still starting? At first --timeout counts up to {PATIENCE_S:g} s only"
    )


def question(form: Form, words: int = LONG_WORDS) -> bytes:
    return form.body(Conversation("probe", (), (Turn((Passage(f"probe {words}", words),), 1),)), 0, ())


async def _sent(endpoint: Endpoint, form: Form, words: int) -> Outcome:
    outcome = Outcome("probe", 0, True, 0.0)
    asked = endpoint.ask(form.path, question(form, words), outcome, 0.0)
    try:
        await asked.ended
    finally:
        asked.abandon()
    return outcome
