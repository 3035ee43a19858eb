"""JSON and YAML texts as plain values, within limits: size, depth, no duplicate keys, no surprises of YAML 1.1."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias

import yaml

from schemas.api.jobs import Invalid
from services.intake.core.validation import pointer_part
from shared.errors import Rejected
from shared.problems import Unprocessable

Value: TypeAlias = dict[str, "Value"] | list["Value"] | str | int | float | bool | None

_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NULL: Final = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLEAN: Final = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER: Final = re.compile(r"[-+]?[0-9]{1,400}|0o[0-7]{1,100}|0x[0-9a-fA-F]{1,100}")
_NUMBER: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE: Final = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_STRING_TAGS: Final = frozenset({None, "!", "tag:yaml.org,2002:str"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """``nodes``: values in one document, an alias counted as all that it stands for. ``depth``: of nesting.
    ``bytes``: of the body, where the server takes larger ones for lists."""

    nodes: int
    depth: int
    bytes: int = 1_048_576


def read_json(text: bytes, *, limits: Limits, checks: bool = True) -> Value:
    """Raises Rejected (400) if it is no JSON, Unprocessable for duplicate keys, NaN, NUL, and above the limits.

    Without ``checks`` the caller calls ``check`` for each of its parts.
    """
    try:
        value: Value = _DECODER.decode(text.decode())
    except json.JSONDecodeError as exc:
        place = f"line {exc.lineno}, column {exc.colno}"
        raise malformed("JSON", f"{exc.msg} at {place}", way_out="send one JSON object") from exc
    except RecursionError as exc:
        raise _too_deep(limits) from exc
    except UnicodeDecodeError as exc:
        raise malformed("JSON", f"byte {exc.start} is not UTF-8", way_out="send UTF-8") from exc
    except _Infinite as exc:
        value = json.loads(text)
        check(value, limits)
        raise AssertionError("a number was infinite, and is not any more") from exc
    except ValueError as exc:
        if isinstance(exc, _Duplicate):
            raise Unprocessable([_duplicate(exc.key)]) from exc
        raise Unprocessable(
            [Invalid(field="", detail=str(exc), way_out="send finite numbers of usual size")]
        ) from exc
    if checks and not _is_plainly_sound(text, limits):
        check(value, limits)
    return value


def read_yaml(text: bytes, *, limits: Limits, checks: bool = True) -> Value:
    """One document, scalars read by the core schema of YAML 1.2: only true and false are booleans.

    Built from the events of the parser without recursion. Raises as ``read_json``.
    """
    builder = _Builder(limits)
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            builder.take(event)
    except yaml.MarkedYAMLError as exc:
        if "nesting depth" in str(exc.problem):
            raise _too_deep(limits) from exc
        mark = exc.problem_mark
        place = "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"
        raise malformed("YAML", f"{exc.problem or 'not understood'}{place}", way_out="check the indentation") from exc
    except yaml.YAMLError as exc:
        raise malformed("YAML", "it has characters that YAML does not allow", way_out="send UTF-8 text") from exc
    if checks:
        check(builder.document, limits)
    return builder.document


def malformed(language: str, detail: str, *, way_out: str) -> Rejected:
    return Rejected(400, "malformed_body", f"the body is not valid {language}: {detail}", way_out=way_out)


class _Duplicate(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _pairs(pairs: list[tuple[str, Value]]) -> dict[str, Value]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Duplicate(key)
            seen.add(key)
    return result


class _Infinite(ValueError):
    """A number beyond what a float holds; ``check`` finds where it stands."""


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _Infinite(text)
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number that JSON has")


def _is_plainly_sound(text: bytes, limits: Limits) -> bool:
    """True where counting bytes already shows that ``check`` would find nothing: nearly always, and much cheaper.

    Brackets bound the depth, separators the number of values, and NUL needs its escape.
    """
    brackets = text.count(b"{") + text.count(b"[")
    separators = text.count(b",") + text.count(b":")
    is_small = brackets < limits.depth and brackets + separators < limits.nodes
    return is_small and b"\\u0000" not in text


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_pairs, parse_float=_float, parse_constant=_no_constant)


def check(value: Value, limits: Limits) -> None:
    """Depth, size, NUL and numbers that are not finite, each named by its JSON pointer."""
    for nodes, (depth, path, item) in enumerate(_walk(value), start=1):
        if nodes > limits.nodes:
            raise _too_large(limits)
        if depth > limits.depth:
            raise _too_deep(limits)
        if isinstance(item, str) and "\x00" in item:
            raise Unprocessable([Invalid(field=path, detail="contains the character NUL", way_out="remove \\u0000")])
        if isinstance(item, float) and not math.isfinite(item):
            raise Unprocessable([Invalid(field=path, detail="is not a finite number", way_out="a finite number")])


def _walk(value: Value) -> Iterator[tuple[int, str, Value]]:
    """Every value and every key, with depth and pointer; no recursion."""
    stack: list[tuple[int, str, Value]] = [(0, "", value)]
    while stack:
        depth, path, item = stack.pop()
        yield depth, path, item
        if isinstance(item, dict):
            for key, inner in item.items():
                place = f"{path}/{pointer_part(key)}"
                if "\x00" in key:
                    yield depth, path, key
                stack.append((depth + 1, place, inner))
        elif isinstance(item, list):
            stack.extend((depth + 1, f"{path}/{index}", inner) for index, inner in enumerate(item))


def _too_deep(limits: Limits) -> Unprocessable:
    return Unprocessable([Invalid(field="", detail="is nested too deeply", way_out=f"at most {limits.depth} levels")])


def _too_large(limits: Limits) -> Unprocessable:
    return Unprocessable(
        [Invalid(field="", detail="has too many values", way_out=f"at most {limits.nodes}, aliases expanded")]
    )


def _duplicate(key: str, path: str = "") -> Invalid:
    return Invalid(field=f"{path}/{pointer_part(key)}", detail="is given twice", way_out="keep one of the two")


# -- YAML -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Open:
    """A collection that is being read. ``key``: the key that waits for its value."""

    value: dict[str, Value] | list[Value]
    anchor: str | None
    path: str
    key: str | None = None


class _Builder:
    """Puts a document together from parser events, with the open collections on a stack.

    An alias is the value itself once more, so it costs nothing here; ``check`` counts it as often as it is used.
    """

    def __init__(self, limits: Limits) -> None:
        self.document: Value = None
        self._limits = limits
        self._documents = 0
        self._stack: list[_Open] = []
        self._anchors: dict[str, Value] = {}

    def take(self, event: Any) -> None:
        match event:
            case yaml.DocumentStartEvent():
                self._documents += 1
                if self._documents > 1:
                    raise malformed("YAML", "it has more than one document", way_out="send one document a request")
            case yaml.ScalarEvent():
                self._add(self._scalar(event), anchor=event.anchor)
            case yaml.AliasEvent():
                self._add_alias(event)
            case yaml.MappingStartEvent():
                self._open({}, event)
            case yaml.SequenceStartEvent():
                self._open([], event)
            case yaml.CollectionEndEvent():
                self._close()
            case _:
                pass

    def _open(self, value: dict[str, Value] | list[Value], event: Any) -> None:
        if not event.implicit and event.tag not in ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
            raise self._tagged(event.tag)
        if len(self._stack) >= self._limits.depth:
            raise _too_deep(self._limits)
        self._refuse_as_key()
        self._stack.append(_Open(value, event.anchor, self._path()))

    def _close(self) -> None:
        done = self._stack.pop()
        self._add(done.value, anchor=done.anchor)

    def _add(self, value: Value, *, anchor: str | None) -> None:
        if anchor is not None:
            self._anchors[anchor] = value
        if not self._stack:
            self.document = value
            return
        top = self._stack[-1]
        if isinstance(top.value, list):
            top.value.append(value)
        elif top.key is None:
            top.key = self._key(value, top)
        else:
            top.value[top.key] = value
            top.key = None

    def _add_alias(self, event: Any) -> None:
        if event.anchor not in self._anchors:
            is_open = any(item.anchor == event.anchor for item in self._stack)
            detail = "contains itself" if is_open else "was not defined before"
            raise malformed("YAML", f"the alias *{event.anchor} {detail}", way_out="write the value out")
        self._refuse_as_key()
        self._add(self._anchors[event.anchor], anchor=None)

    def _key(self, value: Value, top: _Open) -> str:
        assert isinstance(top.value, dict), "only mappings have keys"
        if not isinstance(value, str):
            detail = f"the key {json.dumps(value)} is not a string"
            raise Unprocessable([Invalid(field=top.path, detail=detail, way_out="put the key in quotes")])
        if value in top.value:
            raise Unprocessable([_duplicate(value, top.path)])
        return value

    def _refuse_as_key(self) -> None:
        if self._stack and isinstance(self._stack[-1].value, dict) and self._stack[-1].key is None:
            raise Unprocessable(
                [
                    Invalid(
                        field=self._stack[-1].path, detail="a key is not a string", way_out="use plain words as keys"
                    )
                ]
            )

    def _path(self) -> str:
        if not self._stack:
            return ""
        top = self._stack[-1]
        part = str(len(top.value)) if isinstance(top.value, list) else pointer_part(top.key or "")
        return f"{top.path}/{part}"

    def _scalar(self, event: Any) -> Value:
        text: str = event.value
        if event.tag not in _STRING_TAGS:
            raise self._tagged(event.tag)
        if event.style or event.tag is not None:
            return text
        is_key = bool(self._stack) and isinstance(self._stack[-1].value, dict) and self._stack[-1].key is None
        return text if is_key and text not in _NULL else _resolved(text, self._path())

    def _tagged(self, tag: str) -> Unprocessable:
        return Unprocessable(
            [Invalid(field=self._path(), detail=f"has the tag {tag[:80]}", way_out="tags are not supported")]
        )


def _resolved(text: str, path: str) -> Value:
    """A plain scalar by the core schema of YAML 1.2."""
    if text in _NULL:
        return None
    if text in _BOOLEAN:
        return _BOOLEAN[text]
    if _INTEGER.fullmatch(text):
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if _NUMBER.fullmatch(text):
        return float(text)
    if _NOT_FINITE.fullmatch(text):
        raise Unprocessable([Invalid(field=path, detail="is not a finite number", way_out="a finite number")])
    return text
