"""Every invariant names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "invariants.md").read_text()
CITED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)


def test_every_cited_test_exists():
    missing = [
        f"{path}::{name}"
        for path, name in CITED
        if not re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.M)
    ]
    assert missing == []


def test_every_invariant_cites_one():
    entries = re.split(r"^(?=\d+\. )", PAGE, flags=re.M)[1:]
    assert [int(entry.split(".")[0]) for entry in entries] == list(range(1, len(entries) + 1))
    assert [entry[:60] for entry in entries if "::" not in entry] == []
