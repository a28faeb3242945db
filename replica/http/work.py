"""From a client's request to what the engine is asked. Pure; here a request is measured against the model."""

import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import astuple, replace

from api.errors import context_length, invalid, too_long
from api.generation_apis import CHAT, COMPLETIONS, MESSAGES, RESPONSES, GenerationApi, InnerRequest
from api.native import Native, pack_ids, unpack_ids
from api.openai.constraints import Asked, constraint_of
from api.openai.requests import ChatRequest
from api.openai.sampling import SamplingDefaults
from api.parsing.answer import answer_parser, parsed_tokens
from api.parsing.formats import AnswerFormats
from api.parsing.parsed import AnswerParser
from api.prompts.prompts import check_room
from api.retention import Retain
from api.tokens.tokenizer import Tokenizer
from events.blocks import TOKEN_BYTES
from replica.config import AnswerRule
from replica.grammar.vocabulary import check_constrainable
from replica.http.generation import Choice, Delta, StopConditions
from replica.http.request_reader import ParsedRequest
from replica.messages import KVSource, Sampling, Submit


class ScriptedAnswers:
    """The tokens that each rule has the engine generate."""

    def __init__(self, rules: Sequence[AnswerRule], tokenizer: Tokenizer) -> None:
        self._rules = [(rule, pack_ids(tokenizer.encode(rule.text, add_special_tokens=False))) for rule in rules]

    def token_ids(self, request: InnerRequest) -> bytes:
        """The packed tokens of the answer; empty where no rule matches, as for prompts without messages."""
        if not isinstance(request, ChatRequest):
            return b""
        return next((token_ids for rule, token_ids in self._rules if matches(rule, request)), b"")


def matches(rule: AnswerRule, request: ChatRequest) -> bool:
    """Tell whether the conversation has every feature that the rule names."""
    if rule.last is not None and rule.last not in request.messages[-1].text:
        return False
    if rule.tool is not None and rule.tool not in [tool["function"]["name"] for tool in request.tools]:
        return False
    results = sum(message.role == "tool" for message in request.messages)
    return rule.tool_results is None or rule.tool_results == results


SEEDS = 2**63
MAX_CHOICES = 1024
MAX_PROMPT_LOGPROBS = 2**16  # the limit for one answer: more would hold up other clients when they come from the engine
BYTES_PER_RESUMED_TOKEN = 16
PROMPT_END = 32  # tokens of a prompt in which the beginning of the reasoning is looked for


class Served(Struct, frozen=True):
    """The limits for a request."""

    max_model_len: int
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...] = ()  # the model's, which the tokenizer need not know
    formats: AnswerFormats = AnswerFormats()
    answers: ScriptedAnswers | None = None  # answers of the simulated engine
    block_size: int = 0  # 0: nothing is retained
    sampling: SamplingDefaults = SamplingDefaults()


class ChoiceWork(NamedTuple):
    """One choice of the answer: its request, and the tokens that another replica has already generated."""

    choice: Choice
    submit: Submit | None  # None: it was complete before it came here
    resumed: Delta
    parser: AnswerParser | None = None  # a chat's, which has not read anything yet


class Work(Struct):
    request: InnerRequest
    id: str
    created: int
    prompts: Sequence[Sequence[int]]
    parts: list[ChoiceWork]  # the choices of the first prompt, then those of the second
    api: GenerationApi
    original: Any = None  # the client's own request, where it is of another API
    asked: Asked | None = None  # the form that the answers must have
    retain: Sequence[Retain] = ()  # beginnings of the prompt, in whole blocks, to keep in the cache
    tells_use: bool = False  # to the router, when each choice begins

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


def size_of_plan(parsed: ParsedRequest) -> int:
    """Bytes of a request that take `plan` as long: the tokens of another replica are decoded one by one."""
    return BYTES_PER_RESUMED_TOKEN * sum(map(len, parsed.native.resume_token_ids)) // TOKEN_BYTES


def plan(
    request: InnerRequest,
    native: Native,
    prompts: Sequence[Sequence[int]],
    served: Served,
    new_id: Callable[[], int],
    api: GenerationApi | None = None,
    original: Any = None,
    lora_name: str | None = None,
) -> Work:
    """Return what to submit; raise ApiError if the request does not fit the model."""
    served.sampling.complete(request)
    api = api or (CHAT if isinstance(request, ChatRequest) else COMPLETIONS)
    resumed = _resumed(request, native, prompts)
    asked = constraint_of(request)
    if asked is not None:
        check_constrainable(served.tokenizer, served.eos_token_ids, asked.param)
    _check_prompt_logprobs(request, prompts)
    seeds = [seed for seed in (request.seed, native.seed) if seed is not None]
    seed = seeds[0] if seeds else random.getrandbits(63)
    answer_id = native.response_id or getattr(original, "request_id", None) or api.new_id()
    script = b"" if served.answers is None else served.answers.token_ids(request)
    size = served.block_size  # beginnings are kept as far as they fill blocks
    whole = (replace(each, tokens=each.tokens // size * size) for each in (native.retain if size else ()))
    retain = [each for each in whole if each.tokens]
    parts: list[ChoiceWork] = []
    # A client's own seed must not depend on the prompts around; without one, equal prompts are to differ.
    seeds_repeat = request.n if request.seed is not None else len(resumed)
    for prompt in prompts:
        ending = _ending(request, _max_tokens(request, api, len(prompt), served.max_model_len), served, asked)
        submit = Submit(
            id=0,
            prompt=pack_ids(prompt),
            sampling=_sampling(request, ending, asked, script),
            lora_name=lora_name,
            cache_salt=request.cache_salt if native.cache_salt is None else native.cache_salt,
            priority=native.priority,
            sources=[KVSource(*astuple(each)) for each in native.kv_sources] if len(prompts) == 1 else [],
            retain=retain,
            is_cold=native.is_cold,
        )
        for _ in range(request.n):
            choice = Choice(len(parts), ending, served.tokenizer)
            said = resumed[choice.index]
            if len(said) > ending.max_tokens:
                param = f"resume_token_ids[{choice.index}]"
                most = f"the most that may be generated is {ending.max_tokens}"
                raise invalid(f"{param} has {len(said)} tokens; {most}", param)
            parser = _parser(request, served, answer_id, choice.index, prompt, constrained=asked is not None)
            parts.append(_part(choice, submit, said, seed + choice.index % seeds_repeat, new_id, parser))
            submit = replace(submit, sampling=replace(submit.sampling, prompt_logprobs=None))  # the first says them
    return Work(
        request,
        id=answer_id,
        created=int(time.time()) if native.created is None else native.created,
        prompts=prompts,
        parts=parts,
        api=api,
        original=original,
        asked=asked,
        retain=retain,
        tells_use=native.tells_use,
    )


def _part(
    choice: Choice,
    submit: Submit,
    resumed: Sequence[int],
    seed: int,
    new_id: Callable[[], int],
    parser: AnswerParser | None,
) -> ChoiceWork:
    said = choice.resume(resumed)
    if choice.finish_reason is not None:
        return ChoiceWork(choice, None, said, parser)
    sampling = replace(submit.sampling, seed=seed % SEEDS)
    return ChoiceWork(choice, replace(submit, id=new_id(), sampling=sampling, output=pack_ids(resumed)), said, parser)


def _parser(
    request: InnerRequest, served: Served, answer_id: str, index: int, prompt: Sequence[int], *, constrained: bool
) -> AnswerParser | None:
    if not isinstance(request, ChatRequest):
        return None
    end = ""
    if served.formats.reasoning is not None:
        end = served.tokenizer.decode(prompt[-PROMPT_END:], skip_special_tokens=False)
    return answer_parser(request, served.formats, answer_id, index, prompt_end=end, constrained=constrained)


def _resumed(request: InnerRequest, native: Native, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The tokens that each choice continues; ApiError if there are too many choices."""
    choices = len(prompts) * request.n
    if choices > MAX_CHOICES:
        what = f"{len(prompts)} prompts with n={request.n} are {choices} choices"
        raise invalid(f"{what}; ask for at most {MAX_CHOICES} at once", "n")
    resumed = list(map(unpack_ids, native.resume_token_ids))
    if not resumed:
        return [[]] * choices
    if len(resumed) != choices:
        raise invalid(
            f"resume_token_ids has {len(resumed)} lists; the request has {choices} choices", "resume_token_ids"
        )
    if not request.stream and not (request.alternatives is None and request.scored is None):
        # Log probabilities that another replica computed are not known here, and the client has seen nothing yet.
        return [[]] * choices
    return resumed


def _check_prompt_logprobs(request: InnerRequest, prompts: Sequence[Sequence[int]]) -> None:
    if request.scored is None:
        return
    tokens = sum(map(len, prompts))
    if not isinstance(request, ChatRequest):
        tokens *= request.n  # each choice repeats them
    count = tokens * (request.scored + 1)
    if count > MAX_PROMPT_LOGPROBS:
        name = "prompt_logprobs" if request.scored == request.prompt_logprobs else "logprobs"
        what = f"{name} is {request.scored} and the prompts of all choices have {tokens} tokens"
        fix = f"send less: at most {MAX_PROMPT_LOGPROBS} log probabilities, the tokens' own included, are answered"
        raise invalid(f"{what}, together {count}; {fix}", name)


def _max_tokens(request: InnerRequest, api: GenerationApi, prompt_tokens: int, max_model_len: int) -> int:
    check_room(prompt_tokens, max_model_len, "messages" if isinstance(request, ChatRequest) else "prompt")
    room = max_model_len - prompt_tokens
    wanted = request.output_limit
    if wanted is None:
        return min(room, request.usual_output or room)
    if wanted > room:
        if api is MESSAGES:
            return room  # it has to name a limit, and agents name the same for all models
        limit_name = "max_tokens"
        if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
            limit_name = "max_output_tokens" if api is RESPONSES else "max_completion_tokens"
        both = f"{limit_name} is {wanted} and the prompt has {prompt_tokens} tokens, together {wanted + prompt_tokens}"
        raise too_long(f"{context_length(max_model_len)} However, {both}; ask for at most {room}", limit_name)
    return wanted


def _ending(request: InnerRequest, max_tokens: int, served: Served, asked: Asked | None) -> StopConditions:
    goes_on = request.ignore_eos and asked is None  # after its end a constrained answer has no form to go on in
    return StopConditions(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        stop_token_ids=frozenset(request.stop_token_ids).union(() if goes_on else served.eos_token_ids),
        stop_strings=request.stop_strings,
        show_stop=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        shown_special_tokens=parsed_tokens(request, served.formats)
        if isinstance(request, ChatRequest)
        else frozenset(),
    )


def _sampling(request: InnerRequest, ending: StopConditions, asked: Asked | None, script: bytes) -> Sampling:
    return Sampling(
        max_tokens=max(1, ending.max_tokens),  # a prompt that is only echoed is computed on the way to one token
        min_tokens=ending.min_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=request.logit_bias,
        stop_token_ids=tuple(sorted(ending.stop_token_ids)),
        top_logprobs=request.alternatives,
        ignore_eos=request.ignore_eos,
        prompt_logprobs=request.scored,
        constraint=None if asked is None else asked.constraint,
        script=script,
    )
