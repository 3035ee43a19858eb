"""Reads a job from YAML or JSON, and merges what the command line says on top."""

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

_BYTES_MAX: Final = 1 << 20
_VALUES_MAX: Final = 20_000
_BOOLEAN_TAG: Final = "tag:yaml.org,2002:bool"
_UNWANTED_TAGS: Final = frozenset({_BOOLEAN_TAG, "tag:yaml.org,2002:timestamp"})


class ManifestError(ValueError):
    """The file is no job: says where and what is wrong."""


class _Loader(yaml.SafeLoader):
    """Plain data only. ``on`` and ``yes`` are words, dates are strings, a key may stand once."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _UNWANTED_TAGS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOLEAN_TAG, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))


def _unique_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
            if key.value in seen:
                raise ManifestError(f"line {key.start_mark.line + 1}: {key.value!r} stands there twice")
            seen.add(key.value)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def parse_manifest(text: str) -> dict[str, Any]:
    """One job as YAML or JSON (which is YAML). Raises ManifestError."""
    if len(text) > _BYTES_MAX:
        raise ManifestError("is larger than 1 MiB: a job is a page of text")
    try:
        value = yaml.load(text, Loader=_Loader)  # noqa: S506 - a safe loader, narrowed
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ManifestError(f"{where}{exc.problem or 'not YAML'}") from exc
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        if isinstance(exc, ManifestError):
            raise
        raise ManifestError(f"not YAML: {str(exc).splitlines()[0]}") from exc
    if not isinstance(value, dict):
        raise ManifestError("is not a job: `field: value` lines are expected at the top")
    _count(value, _VALUES_MAX, where="", depth=0)
    return value


def read_manifest(path: Path) -> dict[str, Any]:
    """A job from a file; its relative paths are meant from the file's own folder. Raises ManifestError."""
    try:
        job = parse_manifest(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as exc:
        raise ManifestError("is not UTF-8 text") from exc
    except OSError as exc:
        raise ManifestError(exc.strerror or "cannot be read") from exc
    return with_paths_from(job, path.resolve().parent)


def with_paths_from(job: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """``script`` and ``working_directory`` become absolute, since the server has another working folder."""
    result = dict(job)
    for name in ("script", "working_directory"):
        if isinstance(result.get(name), str) and result[name]:
            result[name] = os.path.normpath(folder / Path(result[name]).expanduser())
    return result


def merged(job: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changes on top of a job; mappings are merged field by field, everything else is replaced."""
    result = dict(job)
    for name, value in changes.items():
        below = result.get(name)
        result[name] = merged(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
    return result


def _count(value: Any, left: int, *, where: str, depth: int) -> int:
    """How many values are left to see. Stops what a few aliases blow up, and what no JSON can say."""
    left -= 1
    if left < 0 or depth > 50:
        raise ManifestError("holds too many values, or too deep")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ManifestError(f"{where or '/'}: the key {key!r} is no word: put it in quotes")
            left = _count(item, left, where=f"{where}/{key}", depth=depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            left = _count(item, left, where=f"{where}/{index}", depth=depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ManifestError(f"{where}: {value} is no number here")
    elif not isinstance(value, str | int | float | None):
        raise ManifestError(f"{where}: a value of the kind {type(value).__name__} has no meaning here")
    return left
