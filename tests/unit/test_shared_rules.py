"""Small rules: back-off, positions, headers, permissions, problems."""

import os
import pwd
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schemas.envelope import Sequence as LogSequence
from schemas.events.worker import RoomFreed
from schemas.registry import encode
from schemas.vocabulary import Topic
from shared.bus.log import Headers, Partition, Position, Record, positions_after, to_event
from shared.db.engine import parse_database_url
from shared.db.state import closed_parent, may_run, prepare_state_directory
from shared.errors import Poison, Rejected
from shared.problems import Unprocessable, to_pointer, to_unprocessable
from shared.runtime.backoff import backoff_seconds
from shared.settings import SettingsError

NOW = datetime(2030, 1, 1, tzinfo=UTC)


@given(st.integers(min_value=0, max_value=10_000), st.floats(min_value=0.01, max_value=100))
def test_backoff_grows_and_never_passes_its_maximum(failures: int, maximum: float) -> None:
    this, following = (backoff_seconds(n, maximum=maximum) for n in (failures, failures + 1))
    assert 0 < this <= following <= maximum


def test_backoff_doubles() -> None:
    assert [backoff_seconds(n, first=0.1, maximum=1) for n in (1, 2, 3, 4, 5)] == [0.1, 0.2, 0.4, 0.8, 1.0]


# -- records --------------------------------------------------------------------------------------------------


def record(**changes: object) -> Record:
    fields: dict[str, object] = {
        "partition": Partition(Topic.WORKER),
        "sequence": LogSequence(5, 6),
        "time": NOW,
        "key": "j1",
        "type": RoomFreed.TYPE,
        "headers": Headers(tenant="default", source="tidewright/execution/x", traceparent=None).encode(),
        "payload": encode(RoomFreed(epoch=1, held=(), capacity_revision=2)),
    }
    return Record(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_record_becomes_an_event() -> None:
    event = to_event(record())
    assert (event.key, event.tenant, event.source, event.sequence) == (
        "j1",
        "default",
        "tidewright/execution/x",
        LogSequence(5, 6),
    )
    assert event.data == RoomFreed(epoch=1, held=(), capacity_revision=2)


@pytest.mark.parametrize("key", [None, ""])
def test_a_record_without_a_key_is_poison_and_parks_nothing(key: str | None) -> None:
    assert not record(key=key).parks_its_key
    with pytest.raises(Poison):
        to_event(record(key=key))


def test_snapshots_park_nothing() -> None:
    assert record().parks_its_key
    assert not record(partition=Partition(Topic.CAPACITY)).parks_its_key
    assert not record(type="tide.allocation.queue_observed.v1").parks_its_key


def test_the_reason_of_poison_does_not_repeat_the_payload() -> None:
    with pytest.raises(Poison) as caught:
        to_event(record(payload=b'{"epoch": "hunter2", "held": [], "capacity_revision": 1}'))
    assert str(caught.value).startswith("epoch: ")
    assert "hunter2" not in str(caught.value)


@given(st.text(max_size=20), st.text(max_size=20), st.none() | st.text(max_size=20))
def test_headers_survive(tenant: str, source: str, trace: str | None) -> None:
    headers = Headers(tenant=tenant, source=source, traceparent=trace)
    assert Headers.parse(headers.encode()) == headers


@pytest.mark.parametrize("data", [b"", b"\xff", b"[]", b"null", b"5", b"{}", b'{"tenant": 1, "source": "s"}'])
def test_bad_headers_are_poison(data: bytes) -> None:
    with pytest.raises(Poison):
        Headers.parse(data)


def test_positions_move_only_where_records_were() -> None:
    before = {Partition(Topic.WORKER): Position(LogSequence(1, 1)), Partition(Topic.JOB): Position(LogSequence(2, 2))}
    after = positions_after([record(sequence=LogSequence(3, 1)), record(sequence=LogSequence(3, 4))], before)
    assert after == {**before, Partition(Topic.WORKER): Position(LogSequence(3, 4))}


# -- database and state folder --------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["postgresql://u:p@h:5/d", "postgres://u:p@h:5/d", "postgresql+psycopg://u:p@h:5/d"])
def test_any_postgres_url_is_taken(url: str) -> None:
    assert str(parse_database_url(url)) == "postgresql+asyncpg://u:***@h:5/d"


@pytest.mark.parametrize("url", ["", "hunter2", "mysql://u:hunter2@h/d"])
def test_another_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_database_url(url)
    assert "hunter2" not in str(caught.value)


def somebody(uid: int = 54_321, gid: int = 54_321) -> pwd.struct_passwd:
    return pwd.struct_passwd(("somebody", "x", uid, gid, "", "/", "/bin/false"))


def test_the_first_closed_folder_is_named(tmp_path: Path) -> None:
    for folder in (*reversed(tmp_path.parents), tmp_path):
        if not folder.stat().st_mode & 0o001:
            assert closed_parent(tmp_path / "a", somebody()) == folder
            break
    deep = tmp_path / "a" / "b" / "c"
    deep.mkdir(parents=True)
    own = somebody(uid=os.geteuid())
    assert closed_parent(deep, own) is None
    (tmp_path / "a").chmod(0o600)
    assert closed_parent(deep, own) == tmp_path / "a"
    (tmp_path / "a").chmod(0o700)


def test_a_program_must_be_reachable_readable_and_executable(tmp_path: Path) -> None:
    program, own = tmp_path / "postgres", somebody(uid=os.geteuid())
    for mode, allowed in ((0o700, True), (0o500, True), (0o600, False), (0o100, False)):
        program.touch()
        program.chmod(mode)
        assert may_run(program, own) is allowed, oct(mode)
    assert not may_run(tmp_path / "missing", own)


def test_the_state_folder_is_made_for_its_owner_only_and_kept_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a" / "state"
    assert prepare_state_directory(path) == path
    assert path.stat().st_mode & 0o777 == 0o700
    path.chmod(0o710)
    prepare_state_directory(path)
    assert path.stat().st_mode & 0o777 == 0o710
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="cannot be made"):
        prepare_state_directory(tmp_path / "file" / "state")


# -- problems -------------------------------------------------------------------------------------------------


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    depth: int = Field(default=1, ge=1)


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: str = Field(pattern="^[a-z]+$", max_length=5)
    inner: Inner = Inner()
    items: list[int] = []


def errors_of(body: str) -> list[tuple[str, str]]:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate_json(body)
    error = to_unprocessable(caught.value, Outer)
    assert isinstance(error, Unprocessable)
    return [(invalid.field, invalid.way_out) for invalid in error.errors]


def test_every_wrong_field_is_told_with_the_way_out() -> None:
    body = '{"name": "A", "inner": {"depth": 0, "width": 2}, "items": [1, "x", 2.5], "more": 1}'
    assert errors_of(body) == [
        ("/name", "must match ^[a-z]+$"),
        ("/inner/depth", "at least 1"),
        ("/inner/width", "known fields: depth"),
        ("/items/1", "an integer"),
        ("/items/2", "an integer"),
        ("/more", "known fields: inner, items, name"),
    ]
    assert errors_of('{"name": "abcdef"}') == [("/name", "at most 5 long")]


def test_what_is_no_json_is_another_error() -> None:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate_json("{nonsense hunter2")
    error = to_unprocessable(caught.value, Outer)
    assert isinstance(error, Rejected)
    assert (error.status, error.code) == (400, "malformed_json")
    assert "hunter2" not in error.detail


@given(st.lists(st.text(alphabet="a/~", min_size=1, max_size=4) | st.integers(0, 9), max_size=4))
def test_pointers_can_be_read_back(location: list[str | int]) -> None:
    parts = to_pointer(location).split("/")[1:]
    assert [part.replace("~1", "/").replace("~0", "~") for part in parts] == [str(part) for part in location]
