"""What the installed wheel takes: signatures that pybind11 writes into docstrings, beside calls in our source."""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

_PARAMETER = re.compile(r"(?P<name>\w+): (?P<type>[^=]+?)(?: = (?P<default>.+))?$")
_PLAIN = {"int": (int,), "str": (str, bytes), "bool": (bool,), "tuple": (tuple,)}


class DoesNotFit(AssertionError):
    """A call that the wheel would refuse."""


@dataclass(frozen=True)
class Native:
    """One overload of a function of a C++ module."""

    signature: inspect.Signature
    types: dict[str, str]

    def check(self, core: ModuleType, *arguments: Any, **named: Any) -> dict[str, Any]:
        """The arguments by name. Raises DoesNotFit."""
        try:
            bound = self.signature.bind(*arguments, **named).arguments
        except TypeError as error:
            raise DoesNotFit(str(error)) from error
        for name, value in bound.items():
            allowed = self._classes(core, self.types[name])
            if allowed and not isinstance(value, allowed):
                raise DoesNotFit(f"{name} must be {self.types[name]}, not {type(value).__name__}")
        return dict(bound)

    def without_self(self) -> "Native":
        """As it is called on an object."""
        _, *parameters = self.signature.parameters.values()
        return Native(self.signature.replace(parameters=parameters), self.types)

    @staticmethod
    def _classes(core: ModuleType, name: str) -> tuple[type, ...]:
        if name in _PLAIN:
            return _PLAIN[name]
        kind = getattr(core, name.rpartition(".")[2], None) if "libpaddle" in name else None
        return (kind,) if isinstance(kind, type) else ()


def overloads(doc: str) -> list[Native]:
    """Parse ``name(a: int, b: str = 'x') -> R``, once or numbered."""
    lines = [re.sub(r"^\d+\. ", "", line.strip()) for line in doc.splitlines()]
    return [native for line in lines if (native := _parse(line)) is not None]


def _parse(line: str) -> Native | None:
    match = re.match(r"\w+\((?P<inside>.*)\)(?: -> .+)?$", line)
    if match is None or "*args" in line:
        return None
    parameters: list[inspect.Parameter] = []
    types: dict[str, str] = {}
    for text in _split(match["inside"]):
        part = _PARAMETER.match(text)
        if part is None:
            return None
        unnamed = re.fullmatch(r"arg\d+", part["name"]) or part["name"] == "self"
        kind = inspect.Parameter.POSITIONAL_ONLY if unnamed else inspect.Parameter.POSITIONAL_OR_KEYWORD
        default = part["default"] if part["default"] is not None else inspect.Parameter.empty
        parameters.append(inspect.Parameter(part["name"], kind, default=default))
        types[part["name"]] = part["type"]
    return Native(inspect.Signature(parameters), types)


def _split(text: str) -> Iterator[str]:
    depth, part = 0, ""
    for char in text:
        depth += (char in "([<") - (char in ")]>")
        if char == "," and depth == 0:
            yield part.strip()
            part = ""
        else:
            part += char
    if part.strip():
        yield part.strip()


def natives_of(function: Any) -> list[Native]:
    """All overloads; of a class, its constructor's, without ``self``. Raises AssertionError if none can be read."""
    is_class = isinstance(function, type)
    found = overloads((function.__init__ if is_class else function).__doc__ or "")
    assert found, f"no signature in the docstring of {function!r}"
    return [native.without_self() for native in found] if is_class else found


# -- calls in our source ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Use:
    """A dotted name below a module of Paddle, as our source writes it; ``call`` if it is called there."""

    where: str
    path: tuple[str, ...]
    call: ast.Call | None


def uses(folder: Path, roots: tuple[str, ...]) -> Iterator[Use]:
    """Every use of ``roots`` in the Python files of a folder, the longest dotted name of each."""
    for file in sorted(folder.glob("*.py")):
        tree = ast.parse(file.read_text())
        called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
        inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and id(node) not in inner:
                path = _dotted(node)
                if path and path[0] in roots:
                    yield Use(f"{file.name}:{node.lineno}", path, called.get(id(node)))


def _dotted(node: ast.expr) -> tuple[str, ...]:
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute) and (before := _dotted(node.value)):
        return (*before, node.attr)
    return ()


def check_shape(call: ast.Call, function: Callable[..., Any]) -> None:
    """Number and names of a call's arguments against what the wheel takes. Raises DoesNotFit."""
    if any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords):
        return
    named = {keyword.arg: None for keyword in call.keywords if keyword.arg is not None}
    try:
        signatures = [inspect.signature(function)]
    except (TypeError, ValueError):
        signatures = [native.signature for native in natives_of(function)]
    refusals = []
    for signature in signatures:
        try:
            signature.bind(*call.args, **named)
        except TypeError as error:
            refusals.append(str(error))
        else:
            return
    raise DoesNotFit("; ".join(refusals))
