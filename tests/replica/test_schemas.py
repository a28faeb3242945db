"""Random schemas, WARMROUTE_RANDOM_SCHEMAS of them: answers are valid, of one replica and of two that share it."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import jsonschema  # type: ignore[import-untyped]
import pytest
import torch

from api.openai.constraints import Constraint
from events.blocks import pack_tokens
from replica.engine.engine import Engine
from replica.grammar.matcher import Matcher
from replica.messages import Sampling, Submit
from tests.late import transformers
from tests.replica.grammar.constraints import compiler, text, vocabulary
from tests.replica.models import SMALL, finish, native

SCHEMAS = int(os.environ.get("WARMROUTE_RANDOM_SCHEMAS", "144"))
TOGETHER = 16
MAX_TOKENS = 1500
LENGTH = 2048
# Keywords of JSON Schema that the schemas are made of. Refused by name: uniqueItems, contains, not, if, then, else,
# dependentRequired, dependentSchemas, propertyNames, unevaluatedItems, unevaluatedProperties.
Maker: TypeAlias = Callable[[random.Random, int], dict[str, Any]]
FORMATS = ("date", "time", "date-time", "ipv4", "uuid")


def random_schema(chance: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema whose answers are bounded, so that a model that babbles comes to their end."""
    leaves: list[Maker] = [_string, _integer, _number, _enum, _const, _formatted, _plain, _pattern]
    nested: list[Maker] = [_object, _array, _tuple, _any_of, _all_of, _reference]
    return chance.choice(leaves if depth == 0 else leaves + nested + nested)(chance, depth - 1)


def _string(chance: random.Random, _: int) -> dict[str, Any]:
    least = chance.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + chance.randint(0, 9)}


def _integer(chance: random.Random, _: int) -> dict[str, Any]:
    least = chance.randint(-200, 200)
    bounds = {chance.choice(["minimum", "exclusiveMinimum"]): least, "maximum": least + chance.randint(3, 500)}
    return {"type": "integer", **bounds, **chance.choice([{}, {"multipleOf": chance.choice([1, 2, 3])}])}


def _number(chance: random.Random, _: int) -> dict[str, Any]:
    least = chance.randint(-50, 50)
    return {"type": "number", "minimum": least, "maximum": least + chance.randint(1, 50)}


def _enum(chance: random.Random, _: int) -> dict[str, Any]:
    return {"enum": chance.sample([1, 2.5, "a", "ü\n", 'quoted " \\', None, True, [1], {"a": [None]}], 3)}


def _const(chance: random.Random, _: int) -> dict[str, Any]:
    return {"const": chance.choice([{"k": [1, {"x": None}]}, "a const", -7, False, []])}


def _formatted(chance: random.Random, _: int) -> dict[str, Any]:
    return {"type": "string", "format": chance.choice(FORMATS)}


def _plain(chance: random.Random, _: int) -> dict[str, Any]:
    return {"type": chance.choice(["boolean", "null", ["boolean", "null"]])}


def _pattern(chance: random.Random, _: int) -> dict[str, Any]:
    return {"type": "string", "pattern": chance.choice(["^[a-z]{2,5}$", r"^\d{3}-\d{2}$", "^(foo|bar){1,2}$"])}


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = [f"p{number}" for number in range(chance.randint(0, 4))]
    fields = {name: random_schema(chance, depth) for name in names}
    required = [name for name in names if chance.random() < 0.6]
    return {"type": "object", "properties": fields, "required": required, "additionalProperties": False}


def _array(chance: random.Random, depth: int) -> dict[str, Any]:
    least = chance.randint(0, 2)
    return {
        "type": "array",
        "items": random_schema(chance, depth),
        "minItems": least,
        "maxItems": least + chance.randint(0, 2),
    }


def _tuple(chance: random.Random, depth: int) -> dict[str, Any]:
    items = [random_schema(chance, depth) for _ in range(chance.randint(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _any_of(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(chance, depth) for _ in range(chance.randint(1, 3))]}


def _all_of(chance: random.Random, depth: int) -> dict[str, Any]:
    bounded = {"type": "array", "items": random_schema(chance, depth), "maxItems": 3}
    return {"allOf": [bounded, {"minItems": 1}]}


def _reference(chance: random.Random, depth: int) -> dict[str, Any]:
    name = f"d{chance.randrange(10**9)}"
    return {"$ref": f"#/$defs/{name}", "$defs": {name: random_schema(chance, depth)}}


def _hoisted(schema: Any, definitions: dict[str, Any]) -> Any:
    """The schema with all definitions at its root, where references look for them."""
    if isinstance(schema, list):
        return [_hoisted(one, definitions) for one in schema]
    if not isinstance(schema, dict) or "const" in schema or "enum" in schema:
        return schema
    definitions |= {name: _hoisted(one, definitions) for name, one in schema.get("$defs", {}).items()}
    return {key: _hoisted(value, definitions) for key, value in schema.items() if key != "$defs"}


def random_root(seed: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {}
    schema: dict[str, Any] = _hoisted(random_schema(random.Random(seed)), definitions)
    return schema | ({"$defs": definitions} if definitions else {})


def ask(engine: Engine, asked: dict[int, tuple[Constraint, list[int]]]) -> dict[int, list[int]]:
    """The whole answers to these constraints, continued from the tokens that are given with them."""
    for number, (constraint, output) in asked.items():
        matcher = Matcher(compiler().compile(constraint).deep_copy(), vocabulary())
        assert matcher.follow(output)
        sampling = Sampling(
            max_tokens=MAX_TOKENS,
            temperature=1.0,
            seed=number,
            stop_token_ids=vocabulary().eos_ids,
            constraint=constraint,
        )
        assert engine.submit(Submit(number, pack_tokens([1, 2, 3]), sampling, pack_tokens(output)), matcher) is None
    answers = finish(engine)
    for number, answer in answers.items():
        assert answer.finish_reason == "stop", (asked[number], text(answer.token_ids))
    return {number: asked[number][1] + answer.token_ids for number, answer in answers.items()}


def check(folder: Path, seeds: range) -> None:
    limits = {"max_model_len": LENGTH, "num_blocks": 2048}
    first, second = native(folder, **limits), native(folder, **limits)
    for start in range(seeds.start, seeds.stop, TOGETHER):
        schemas = {seed: random_root(seed) for seed in range(start, min(start + TOGETHER, seeds.stop))}
        constraints = {seed: Constraint("json_schema", json.dumps(schema)) for seed, schema in schemas.items()}
        answers = ask(first, {seed: (constraint, []) for seed, constraint in constraints.items()})
        for seed, answer in answers.items():
            jsonschema.Draft202012Validator(schemas[seed]).validate(json.loads(text(answer)))
        halves = {seed: (constraints[seed], answer[: (len(answer) - 1) // 2]) for seed, answer in answers.items()}
        assert ask(second, halves) == answers


def save_babbler(folder: Path) -> Path:
    """A small model with the demo's vocabulary, which says anything with about the same likelihood."""
    torch.manual_seed(1)
    sizes = SMALL | {"vocab_size": len(vocabulary().tokens), "max_position_embeddings": LENGTH}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_babbler(tmp_path_factory.mktemp("models") / "babbler")


def test_answers_to_random_schemas_are_valid_with_and_without_a_failover(folder: Path) -> None:
    check(folder, range(48))


@pytest.mark.grid
@pytest.mark.timeout(900)
def test_many_of_them(folder: Path) -> None:
    check(folder, range(48, SCHEMAS))
