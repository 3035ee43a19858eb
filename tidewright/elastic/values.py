"""Plain values (numbers, texts, lists, dicts, arrays) as bytes and back, without pickle."""

import json
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from tidewright.elastic.errors import ElasticError

_MARK: Final = "__tide__"
_LENGTH_BYTES: Final = 8


def encode_values(value: Any, *, where: str) -> bytes:
    """A header of JSON, then the bytes of the arrays. Raises ElasticError naming ``where`` for anything else."""
    arrays: list[np.ndarray[Any, Any]] = []
    header = json.dumps(_flatten(value, arrays, where)).encode()
    return b"".join((len(header).to_bytes(_LENGTH_BYTES, "little"), header, *(array.tobytes() for array in arrays)))


def decode_values(data: bytes, *, to_tensor: Callable[[Any], Any]) -> Any:
    """Inverse of ``encode_values``; ``to_tensor`` makes what was a tensor one again. Raises ValueError."""
    if len(data) < _LENGTH_BYTES:
        raise ValueError("values are cut off")
    begin = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    header = json.loads(data[_LENGTH_BYTES:begin])
    return _restore(header, memoryview(data)[begin:], to_tensor)


def _flatten(value: Any, arrays: list[np.ndarray[Any, Any]], where: str) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) or (hasattr(value, "numpy") and hasattr(value, "dtype")):
        kind = "array" if isinstance(value, np.ndarray) else "tensor"
        array = np.ascontiguousarray(value if kind == "array" else value.numpy())
        if array.dtype.hasobject:
            raise ElasticError(f"{where}: an array of objects cannot be sent to other workers")
        at = sum(each.nbytes for each in arrays)
        shape = list(np.shape(value))  # ascontiguousarray makes one dimension of none
        arrays.append(array)
        return {_MARK: kind, "dtype": array.dtype.str, "shape": shape, "at": at, "bytes": array.nbytes}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {_MARK: kind, "items": [_flatten(item, arrays, where) for item in value]}
    if isinstance(value, dict):
        pairs = [[_flatten(key, arrays, where), _flatten(item, arrays, where)] for key, item in value.items()]
        return {_MARK: "dict", "items": pairs}
    raise ElasticError(
        f"{where}: its state_dict holds a {type(value).__name__}; only numbers, texts, lists, dicts, arrays and "
        "tensors can be sent to other workers"
    )


def _restore(value: Any, body: memoryview, to_tensor: Callable[[Any], Any]) -> Any:
    if not isinstance(value, dict):
        return value
    match value[_MARK]:
        case "dict":
            return {_restore(k, body, to_tensor): _restore(v, body, to_tensor) for k, v in value["items"]}
        case "list":
            return [_restore(item, body, to_tensor) for item in value["items"]]
        case "tuple":
            return tuple(_restore(item, body, to_tensor) for item in value["items"])
        case kind:
            part = body[value["at"] : value["at"] + value["bytes"]]
            array = np.frombuffer(part, dtype=np.dtype(value["dtype"])).reshape(value["shape"]).copy()
            return to_tensor(array) if kind == "tensor" else array
