"""Request bodies: JSON or YAML by content type, to a validated model; errors name the field and the way out."""

import json
from dataclasses import replace
from hashlib import sha256
from typing import Final, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from schemas.api.jobs import Invalid
from services.intake.http.documents import Limits, Value, check, read_json, read_yaml
from shared.errors import Rejected
from shared.problems import Unprocessable, to_invalid, to_pointer, to_unprocessable

JSON_TYPES: Final = ("application/json", "application/merge-patch+json")
YAML_TYPES: Final = ("application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml")
_BRANCHES: Final = frozenset({"str", "constrained-str", "int", "float"})
"""How pydantic names the branches of the only union there is, ``Quantity``, in the place of an error."""
_QUANTITY: Final = "a number, or text such as 500m, 2 or 512Mi"
M = TypeVar("M", bound=BaseModel)


async def read_body(request: Request, model: type[M], *, limits: Limits, may_be_empty: bool = False) -> M:
    """Raises Rejected (400, 415) or Unprocessable (422, all fields that are wrong)."""
    body = await request.body()
    if not body.strip():
        if may_be_empty:
            return model()
        raise Rejected(400, "empty_body", "the body is empty", way_out="send one JSON or YAML object")
    if len(body) > limits.bytes:
        told = f"the body is larger than {limits.bytes} bytes, which is the limit"
        raise Rejected(413, "body_too_large", told)
    return parse(body, content_type=request.headers.get("content-type", ""), model=model, limits=limits)


def parse(body: bytes, *, content_type: str, model: type[M], limits: Limits) -> M:
    kind = content_type.partition(";")[0].strip().lower()
    if kind in YAML_TYPES:
        value = read_yaml(body, limits=limits)
        text = json.dumps(value).encode()
    elif kind in JSON_TYPES or not kind:
        value, text = read_json(body, limits=limits), body
    else:
        raise Rejected(
            415,
            "unsupported_media_type",
            f"bodies of type {kind[:80]} are not understood",
            way_out="Content-Type: application/json or application/yaml",
        )
    if not isinstance(value, dict):
        raise Unprocessable([Invalid(field="", detail="is not an object", way_out="send fields and their values")])
    try:
        return model.model_validate_json(text)
    except ValidationError as exc:
        raise _refusal(exc, model) from exc


def is_list(body: bytes, content_type: str) -> bool:
    """Whether the body is a list of jobs, by its first character."""
    first = body.lstrip()[:2]
    kind = content_type.partition(";")[0].strip().lower()
    return first[:1] == b"[" or (kind in YAML_TYPES and first == b"- ")


def parse_list(
    body: bytes, *, content_type: str, model: type[M], limits: Limits, items_max: int
) -> list[M | Unprocessable | Rejected]:
    """Each item as the model, or why it is none. Raises Rejected or Unprocessable for what is no list at all.

    ``limits``: of each item.
    """
    whole = replace(limits, nodes=limits.nodes * items_max, depth=limits.depth + 1)
    is_yaml = content_type.partition(";")[0].strip().lower() in YAML_TYPES
    read = read_yaml if is_yaml else read_json
    values = read(body, limits=whole, checks=False)
    if not isinstance(values, list):
        raise Unprocessable([Invalid(field="", detail="is not a list", way_out="send a list of jobs")])
    if not 1 <= len(values) <= items_max:
        raise Unprocessable(
            [Invalid(field="", detail=f"has {len(values)} jobs", way_out=f"send 1 to {items_max} jobs in one list")]
        )
    return [_parse_item(value, model=model, limits=limits) for value in values]


def _parse_item(value: Value, *, model: type[M], limits: Limits) -> M | Unprocessable | Rejected:
    if not isinstance(value, dict):
        return Unprocessable([Invalid(field="", detail="is not an object", way_out="send fields and their values")])
    text = json.dumps(value)
    if len(text) > limits.bytes:
        return Rejected(413, "body_too_large", f"the job is larger than {limits.bytes} bytes, which is the limit")
    try:
        check(value, limits)
        return model.model_validate_json(text)
    except Unprocessable as refused:
        return refused
    except ValidationError as exc:
        return _refusal(exc, model)


def _refusal(exc: ValidationError, model: type[BaseModel]) -> Unprocessable | Rejected:
    """As ``to_unprocessable``, with one error for a value that no branch of a union takes, at the value itself."""
    errors = exc.errors(include_url=False, include_input=False)
    branches = [error["loc"][:-1] for error in errors if error["loc"] and error["loc"][-1] in _BRANCHES]
    if not branches:
        return to_unprocessable(exc, model)
    found = [to_invalid(error, model) for error in errors if error["loc"][:-1] not in branches]
    places = sorted({to_pointer(location) for location in branches})
    return Unprocessable(
        [*found, *(Invalid(field=place, detail="is not a quantity", way_out=_QUANTITY) for place in places)]
    )


def hash_of(model: BaseModel, *context: str, but: frozenset[str] = frozenset()) -> bytes:
    """The same for equal requests, whatever their spelling: of the parsed body, and what else decides."""
    canonical = json.dumps(model.model_dump(mode="json", exclude=set(but)), sort_keys=True, separators=(",", ":"))
    return sha256("\n".join((canonical, *context)).encode()).digest()
