"""A Dockerfile as stages and instructions, as far as ours goes."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "Dockerfile"
FLAG = re.compile(r"--(\w[\w-]*)=(\S+)\s+")
VARIABLE = re.compile(r"\$\{(\w+)\}")


class Instruction(NamedTuple):
    keyword: str
    flags: tuple[tuple[str, str], ...]
    value: str
    line: int

    def flag(self, name: str) -> str | None:
        return dict(self.flags).get(name)

    @property
    def words(self) -> list[str]:
        """Words of the value, which is a JSON array or a shell line."""
        words: list[str] = json.loads(self.value) if self.value.startswith("[") else shlex.split(self.value)
        return words


class Stage(NamedTuple):
    name: str
    base: str
    instructions: tuple[Instruction, ...]

    def all(self, keyword: str) -> list[Instruction]:
        return [each for each in self.instructions if each.keyword == keyword]


class Dockerfile(NamedTuple):
    arguments: dict[str, str]  # arguments before the first FROM
    stages: dict[str, Stage]

    def lineage(self, name: str) -> list[Stage]:
        """A stage and its bases, from the bottom."""
        stage = self.stages[name]
        return [*(self.lineage(stage.base) if stage.base in self.stages else []), stage]

    def last(self, name: str, keyword: str) -> Instruction:
        """The instruction in effect for an image: the last in its lineage."""
        return [each for stage in self.lineage(name) for each in stage.all(keyword)][-1]

    def environment(self, name: str) -> dict[str, str]:
        values: dict[str, str] = {}
        for stage in self.lineage(name):
            for each in stage.all("ENV"):
                values |= dict(word.split("=", 1) for word in shlex.split(each.value))
        return values


def read(file: Path = DOCKERFILE) -> Dockerfile:
    return parse(file.read_text())


def parse(text: str) -> Dockerfile:
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    for each in instructions(text):
        if each.keyword == "FROM":
            base, _, name = each.value.partition(" AS ")
            stages[name] = Stage(name, base, ())
        elif not stages:
            assert each.keyword == "ARG", f"line {each.line}: {each.keyword} before FROM"
            arguments |= dict([each.value.split("=", 1)])
        else:
            name, stage = list(stages.items())[-1]
            stages[name] = stage._replace(instructions=(*stage.instructions, each))
    return Dockerfile(arguments, stages)


def instructions(text: str) -> Iterator[Instruction]:
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        whole = line
        while whole.endswith("\\"):
            _, line = next(lines)
            if not line.lstrip().startswith("#"):
                whole = f"{whole[:-1]} {line.strip()}"
        keyword, _, value = whole.partition(" ")
        value, flags = value.strip(), []
        while found := FLAG.match(value):
            flags.append((found[1], found[2]))
            value = value[found.end() :]
        yield Instruction(keyword, tuple(flags), value, number)


def filled(value: str, variables: Mapping[str, str]) -> str:
    return VARIABLE.sub(lambda found: variables.get(found[1], ""), value)


def health_check(dockerfile: Dockerfile, target: str) -> list[str]:
    value = dockerfile.last(target, "HEALTHCHECK").value
    command: list[str] = json.loads(value[value.index("[") :])
    return command
