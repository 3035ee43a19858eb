"""Every event version ever published still decodes, matches its committed schema, and its docs are up to date."""

import json
from pathlib import Path

import jsonschema
import pytest

from schemas.generate import SCHEMA_DIRECTORY, generated_files
from schemas.registry import EVENT_CLASSES, decode, encode

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("cls", EVENT_CLASSES, ids=lambda cls: cls.TYPE)
def test_golden_message_decodes_and_encodes_to_the_same(cls):
    payload = (GOLDEN / f"{cls.TYPE}.json").read_bytes()
    data = decode(cls.TYPE, payload)
    assert type(data) is cls
    assert json.loads(encode(data)) == json.loads(payload)


@pytest.mark.parametrize("cls", EVENT_CLASSES, ids=lambda cls: cls.TYPE)
def test_golden_message_matches_the_committed_schema(cls):
    schema = json.loads((SCHEMA_DIRECTORY / f"{cls.TYPE}.json").read_text())
    payload = json.loads((GOLDEN / f"{cls.TYPE}.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(payload)
    required = schema["required"]
    del payload[required[0]]
    with pytest.raises(jsonschema.ValidationError, match=required[0]):
        jsonschema.Draft202012Validator(schema).validate(payload)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("earlier/*.json")), ids=lambda path: path.stem)
def test_a_message_of_an_earlier_release_decodes(path):
    """As it was published before optional fields were added to its version."""
    payload = json.loads(path.read_bytes())
    decoded = json.loads(encode(decode(path.stem, path.read_bytes())))
    assert says_all_of(decoded, payload)
    assert decoded != payload


def says_all_of(now, then):
    """Every field that was there has its value; others may have been added, also to the parts of a list."""
    if isinstance(then, dict):
        return all(name in now and says_all_of(now[name], value) for name, value in then.items())
    if isinstance(then, list):
        return len(now) == len(then) and all(map(says_all_of, now, then))
    return now == then


def test_a_field_of_a_newer_release_is_ignored():
    payload = json.loads((GOLDEN / "tide.scaling.proposed.v1.json").read_text())
    expected = decode("tide.scaling.proposed.v1", json.dumps(payload).encode())
    payload["of_a_newer_release"] = {"nested": [1, 2]}
    assert decode("tide.scaling.proposed.v1", json.dumps(payload).encode()) == expected


def test_unknown_type_is_told_apart():
    with pytest.raises(KeyError):
        decode("tide.scaling.proposed.v2", b"{}")


def test_generated_files_are_what_the_models_say():
    assert [path.name for path, text in generated_files() if path.read_text() != text] == []


@pytest.mark.parametrize("cls", EVENT_CLASSES, ids=lambda cls: cls.TYPE)
def test_docstring_says_by_whom_and_for_whom(cls):
    text = cls.__doc__ or ""
    assert "By: " in text
    assert "For: " in text
