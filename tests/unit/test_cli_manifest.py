"""Manifests: plain data, each fault with its place."""

from pathlib import Path

import pytest

from tidewright.cli.manifest import ManifestError, merged, parse_manifest, with_paths_from


def test_words_stay_words():
    job = parse_manifest("a: on\nb: yes\nc: true\nd: 2026-01-01\ne: '1'\nf: 1\ng: null\nh: 1.5\n")
    assert job == {"a": "on", "b": "yes", "c": True, "d": "2026-01-01", "e": "1", "f": 1, "g": None, "h": 1.5}


def test_json_is_accepted():
    assert parse_manifest('{"script": "x.py", "args": ["--epochs", "3"]}')["args"] == ["--epochs", "3"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: 1\na: 2\n", "line 2: 'a' stands there twice"),
        ("- 1\n", "`field: value`"),
        ("", "`field: value`"),
        ("a: [1,\n", "line 2"),
        ("resources:\n  cpu: .nan\n", "/resources/cpu"),
        ("args: [1, .inf]\n", "/args/1"),
        ("1: x\n", "put it in quotes"),
        ("a: !!python/object/apply:os.system ['true']\n", "constructor"),
        ("a: !!binary aGk=\n", "/a"),
        ("a: &a [*a]\n", "recursive"),
        ('a: "\x00"\n', "special characters"),
        ("[" * 5000, "recursion"),
        ("{a: " * 60 + "1" + "}" * 60, "too deep"),
        ("x" * (1 << 20) + ": 1", "larger than 1 MiB"),
    ],
)
def test_faults_say_where(text, told):
    with pytest.raises(ManifestError) as caught:
        parse_manifest(text)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_aliases_may_not_blow_up():
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 8)]
    with pytest.raises(ManifestError, match="too many values"):
        parse_manifest("\n".join(rows))


def test_modest_anchors_and_merge_keys_work():
    job = parse_manifest("base: &b {cpu: 1, memory: 1Gi}\nresources:\n  <<: *b\n  cpu: 2\n")
    assert job["resources"] == {"cpu": 2, "memory": "1Gi"}


def test_relative_paths_are_meant_from_the_manifest():
    job = with_paths_from({"script": "../train.py", "working_directory": "/w", "name": "x"}, Path("/jobs/night"))
    assert job == {"script": "/jobs/train.py", "working_directory": "/w", "name": "x"}


def test_flags_win_and_mappings_merge():
    job = merged({"resources": {"cpu": "1", "memory": "1Gi"}, "args": ["a"]}, {"resources": {"cpu": "2"}, "args": []})
    assert job == {"resources": {"cpu": "2", "memory": "1Gi"}, "args": []}
