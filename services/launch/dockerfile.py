"""Reads a Dockerfile into stages of instructions: for those who check it, or follow it without Docker."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

_FROM: Final = re.compile(r"(?P<base>\S+)(?:\s+AS\s+(?P<name>\S+))?", re.IGNORECASE)
_VARIABLE: Final = re.compile(r"\$\{(\w+)\}")
_KNOWN: Final = frozenset(
    {"ARG", "CMD", "COPY", "ENV", "HEALTHCHECK", "LABEL", "RUN", "STOPSIGNAL", "USER", "WORKDIR"}
)


class DockerfileError(Exception):
    """An instruction that is not understood, with its line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    keyword: str
    text: str

    def words(self) -> list[str]:
        """The exec form: a JSON list, after the flags of a HEALTHCHECK. Raises DockerfileError for the shell form."""
        _, found, rest = self.text.partition("[")
        try:
            words: Any = json.loads(found + rest)
        except ValueError as exc:
            raise DockerfileError(f"{self.keyword} is not in exec form: {self.text}") from exc
        return [str(word) for word in words]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """``base``: an image, or the name of an earlier stage."""

    name: str
    base: str
    instructions: list[Instruction] = field(default_factory=list)

    def of(self, keyword: str) -> list[Instruction]:
        return [each for each in self.instructions if each.keyword == keyword]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """``stage``: None where it comes from the source tree."""

    stage: str | None
    sources: tuple[str, ...]
    target: str

    @classmethod
    def of(cls, instruction: Instruction) -> "Copy":
        words = instruction.text.split()
        flags = dict(word[2:].split("=", 1) for word in words if word.startswith("--"))
        *sources, target = [word for word in words if not word.startswith("--")]
        return cls(stage=flags.get("from"), sources=tuple(sources), target=target)


def read_dockerfile(text: str) -> dict[str, Stage]:
    """The stages by name, in the file's order; a stage without a name is called by its number."""
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    for number, line in _logical_lines(text):
        keyword, _, rest = line.partition(" ")
        keyword, rest = keyword.upper(), rest.strip()
        if keyword == "FROM":
            stage = _stage(_filled(rest, arguments), default=str(len(stages)))
            stages[stage.name] = stage
        elif keyword not in _KNOWN:
            raise DockerfileError(f"line {number}: {keyword} is not understood")
        elif stages:
            list(stages.values())[-1].instructions.append(Instruction(keyword=keyword, text=rest))
        elif keyword == "ARG":
            name, _, value = rest.partition("=")
            arguments[name] = value
        else:
            raise DockerfileError(f"line {number}: {keyword} before the first FROM")
    return stages


def lineage(stages: Mapping[str, Stage], name: str) -> list[Stage]:
    """The stage and those that it begins from, the outermost last."""
    found = [stages[name]]
    while found[-1].base in stages:
        found.append(stages[found[-1].base])
    return found


def effective(stages: Mapping[str, Stage], name: str, keyword: str) -> Instruction | None:
    """The last one of its kind that holds for the image of this stage."""
    for stage in lineage(stages, name):
        if found := stage.of(keyword):
            return found[-1]
    return None


def _stage(text: str, *, default: str) -> Stage:
    match = _FROM.fullmatch(text)
    if match is None:
        raise DockerfileError(f"FROM {text} is not understood")
    return Stage(name=match["name"] or default, base=match["base"])


def _filled(text: str, arguments: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda match: arguments.get(match[1], ""), text)


def _logical_lines(text: str) -> list[tuple[int, str]]:
    """Without comments; what a backslash continues is one line."""
    found: list[tuple[int, str]] = []
    pending = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        pending += line.strip()
        if pending.endswith("\\"):
            pending = f"{pending[:-1].rstrip()} "
            continue
        found.append((number, pending))
        pending = ""
    return found
