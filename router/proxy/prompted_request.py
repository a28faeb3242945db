"""A generation request whose prompt is made: at once, on a thread or, for a large body, in another process."""

import asyncio
import logging
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from api.errors import ApiError
from api.generation_apis import CHAT, GenerationApi
from router.members.members import ServedModel, no_replica
from router.placement.classes import ServiceClass, chosen
from router.placement.decision import Decision
from router.prompts.canonical import peek_of
from router.prompts.prompt import Peek, Prompt, forget_others, read_peek, salted_for
from router.prompts.reading.client import is_quick
from router.prompts.reading.messages import Found, Make
from router.prompts.tokens import Tokens
from router.proxy.attempt import Attempt
from router.proxy.exchange import Exchange
from router.proxy.large_prompts import make_for, prompt_from
from router.proxy.log_notes import Notes
from router.proxy.predicted_hit import CACHED
from router.proxy.prefill import Prefill
from router.proxy.request import Request
from router.proxy.request_summary import RequestSummary
from router.proxy.sessions import session_of
from router.proxy.token_use import Generated, generated_by, prompt_use, prompts_told
from router.proxy.withheld import peek_withheld
from router.tenants.keys import Key
from router.tenants.limits import NOTHING, Use

log = logging.getLogger(__name__)


def peek_into(api: GenerationApi, body: bytes, peek: Peek | None = None) -> Peek:
    """The fields that the router reads of this API's requests; `peek`: those that chats and completions have."""
    peek = peek or read_peek(body)
    if peek.prompt is not None or not api.is_chat:
        forget_others(peek, api)
    if api.inner is not None and (conversation := peek_of(api.name, body, peek.model)) is not None:
        peek.messages = conversation.messages  # with what stands beside them there
    return peek


@dataclass(slots=True, eq=False)
class PromptedRequest(Request):
    api: GenerationApi = CHAT
    peek: Peek = field(init=False)
    prompt: Prompt = field(init=False)
    model: ServedModel | None = None
    generated: Generated | None = None  # when it was last asked what it has used
    trace: Any = None  # router.records.tracing.RequestTrace, whose package is an extra; None: not traced
    _tokens_of_model: Tokens = field(init=False)

    @property
    def model_name(self) -> str:
        return self.peek.model

    @property
    def prompt_field(self) -> Literal["messages", "prompt"]:
        return "messages" if self.api.is_chat else "prompt"

    @property
    def session(self) -> str | None:
        session = session_of(self.exchange.scope["headers"], self.peek.prompt_cache_key)
        return None if session is None else session.key

    def _service_of(self, key: Key) -> ServiceClass | None:
        return chosen(key.classes, self.peek.service_tier, self._priority)

    def _take_notes(self) -> None:
        """Begin the request's notes and its trace, if somebody reads them."""
        self.notes = Notes() if self.router.history.request_log is not None else None
        if self.router.tracing is not None:
            self.trace = self.router.tracing.begin(self.exchange.scope["headers"])

    def serve(self, exchange: Exchange) -> None:
        """Begin with the whole body."""
        router, body = self.router, exchange.take_body()
        self._body = body
        self.came_s = router.now_s()
        if self.notes is not None and router.config.log_prompts:
            self.notes.body = bytes(body)
        try:
            if is_quick(body):
                self._body, peek, self._priority = peek_withheld(body, self._withheld)
                self._make_prompt(peek)
            else:
                self.aside(partial(self._read_apart, body))
        except ApiError as error:
            self.refuse(error)

    def prompted(self, prompt: Prompt) -> None:
        """Handle the prompt; overridden."""
        raise NotImplementedError

    def _make_prompt(self, peek: Peek | None = None) -> None:
        """Make the prompt where that delays no other client; `peek`: the body's, which is quick to read."""
        body = self._body
        if peek is None and not is_quick(body):
            self.aside(partial(self._read_apart, body))
            return
        self.peek = peek_into(self.api, body, peek)
        model = self.model = self.router.members.model(self.peek.model)
        salt = self.admitted.cache_salt(self.peek.cache_salt)
        draft = partial(model.tokens.draft, self.api.name, body, self.peek, model.lora, salt, model.max_model_len)
        if not model.tokens.is_quick(body):
            self.router.in_thread(lambda: draft().finish(), len(body), self._made)
            return
        drafted = draft()
        if drafted.is_quick:
            self.prompted(drafted.finish())
        else:
            self.router.in_thread(drafted.finish, len(body), self._made)

    def _made(self, made: "asyncio.Future[Prompt]") -> None:
        """Handle the prompt made by a thread."""
        if made.cancelled() or self.is_over:
            return
        try:
            self.prompted(made.result())
        except ApiError as error:
            self.refuse(error)
        except Exception:
            log.exception("A prompt could not be made")
            self.exchange.fail()
        finally:
            del made  # its error refers to this frame: a cycle, which would keep the body until it is collected

    async def _read_apart(self, body: bytes) -> None:
        """Have a large body read in another process."""
        salt: str | None = None

        def want(found: Found) -> Make:
            nonlocal salt
            self.peek = Peek(**found.fields)
            salt = self.admitted.cache_salt(self.peek.cache_salt)
            model = self.model = self.router.members.model(self.peek.model)
            return make_for(model, self.api.name, salt)

        body, _ = await asyncio.to_thread(self._withhold, body)
        self._body = body
        made = await self.router.reading.read(body, want)
        self.exchange.aside = None
        assert made is not None and self.model is not None, "it was wanted"
        prompt = prompt_from(made, self.model, self.peek, salt)
        self._body = self._body if made.body is None else made.body  # None: it is unchanged
        self.exchange.hold(len(self._body) + sum(map(len, prompt.packed)))
        self.prompted(prompt)

    # ---- what it uses

    def expected_use(self) -> Use:
        return prompt_use(self.prompt.all_tokens, self.hit.cached_tokens)

    def used(self) -> Use:
        generated = self.generated = generated_by(self.attempts)
        if self.exchange.status >= 400 and not generated.tokens:
            return NOTHING
        attempts = self.attempts
        if not attempts or (attempts[-1].status >= 400 and all(attempt.status >= 400 for attempt in attempts)):
            return NOTHING  # none took it
        prompt = self.prompt
        if (told := prompts_told(self.attempts)) is not None:
            self.hit.reported_tokens = told.cached
            tokens = told.computed + told.cached
            if told.choices < prompt.choices:  # how much of the others was computed is not known
                tokens = max(tokens, prompt.all_tokens)
            return prompt_use(tokens, told.cached, generated.tokens)
        report = None if self.resumes else self.attempts[-1].report
        tokens = prompt.all_tokens if report is None or report.prompt is None else report.prompt
        hit = self.hit if self.prefill is None or self.prefill.outcome != "handed" else self.prefill.hit
        return prompt_use(tokens, hit.cached_tokens, generated.tokens)

    # ---- the choice

    def _choose(self) -> Decision:
        router, model = self.router, self.model
        assert model is not None, "it is ready"
        is_looked_up = not self.peek.skips_cache(self.api.is_chat)
        decision = self.hit.decide(
            router,
            model,
            self.prompt,
            self.session,
            self.tried,
            self.came_s,
            is_looked_up=is_looked_up,
            tenant=self.tenant,
            source=self._source,
        )
        if self.notes is not None:
            self.notes.decided(next(router.order), decision, model.members, router.feeds)
        return decision

    def _computes_elsewhere(self, decision: Decision) -> bool:
        model = self.model
        if model is None or not model.splits or self.exchange.response_started:
            return False
        if self.prefill is None:
            self.prefill = Prefill(self.router, self.exchange, self.admitted, self.api.name, self.peek, self.place)
        return self.prefill.begin(
            decision,
            model,
            self.prompt,
            salted_for(self.prompt, self._body),
            session=self.session,
            came_s=self.came_s,
            attempts=self.attempts,
            notes=self.notes,
            trace=self.trace,
        )

    def _is_ready(self) -> bool:
        model = self.model = self.router.members.model(self.peek.model)  # the replicas may have changed
        if not (self._since_s or self.retries or self._paused_s) or not self._is_outdated(model):
            return True
        if self.exchange.response_started:
            raise no_replica("the model has another tokenizer by now")
        self._make_prompt()
        return False

    def _is_outdated(self, model: ServedModel) -> bool:
        """Return whether the prompt's tokens may differ from those of the present replicas."""
        made_otherwise = model.tokens is not self._tokens_of_model or model.lora != self.prompt.lora
        return made_otherwise or (self.prompt.exact and model.tokens.why_not is not None)

    # ---- the answer

    def _observe(self, attempt: Attempt, body: bytes) -> None:
        """Note the time of the first byte, and the figures that an engine tells."""
        if not self.first_byte_s:
            self._first_byte()
        # A stream comes in many parts, and few of them have a report: only those are worth a call.
        if CACHED in body and self.hit.reported_tokens is None and not attempt.framed and not self.resumes:
            self.hit.read(self.router, self.model, self.prompt, attempt.member, body)
        if attempt.report is not None:
            attempt.report.read(body)

    def summary(self) -> RequestSummary:
        decision = self.decision
        return RequestSummary(
            exchange=self.exchange,
            admitted=self.admitted,
            arrived_s=self.arrived_s,
            ended_s=self.ended_s,
            first_byte_s=self.first_byte_s,
            waited_s=self.waited_s,
            retries=self.retries,
            resumes=self.resumes,
            why=self.why,
            chat=self.api.is_chat,
            model=self.model,
            generation=None if decision is None else self.hit.summary(self.peek, self.prompt, decision),
            attempts=self.attempts,
            prefill=None if self.prefill is None else self.prefill.summary(),
            notes=self.notes,
            trace=self.trace,
            used=self.used(),
            output_tokens=None if self.generated is None else self.generated.told,
        )
