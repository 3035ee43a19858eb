"""Settings: file below environment, errors that name the setting and its place."""

from pathlib import Path
from typing import Annotated, ClassVar

import pytest
from pydantic import Field

from schemas.vocabulary import ServiceName
from shared.settings import (
    InstallationSettings,
    Positive,
    SectionSettings,
    ServiceSettings,
    SettingsError,
    default_state_directory,
)


class Scaling(ServiceSettings):
    SECTION: ClassVar[str] = "scaling"

    window_seconds: Positive = 300.0
    names: Annotated[tuple[str, ...], Field(max_length=2)] = ()


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("TIDE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "tide.toml"
    monkeypatch.setenv("TIDE_CONFIG", str(path))
    return path


def problem_of(cls: type[SectionSettings]) -> str:
    with pytest.raises(SettingsError) as caught:
        cls.load()
    return str(caught.value)


def test_environment_wins_over_file_and_file_over_default(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.touch()
    assert Scaling.load().window_seconds == 300
    file.write_text("[scaling]\nwindow_seconds = 7\nport = 9\nnames = ['a']\n[queueing]\nport = 8\n")
    assert (Scaling.load().window_seconds, Scaling.load().port, Scaling.load().names) == (7.0, 9, ("a",))
    monkeypatch.setenv("TIDE_SCALING_WINDOW_SECONDS", "4")
    monkeypatch.setenv("TIDE_SCALING_NAMES", '["x", "y"]')
    assert (Scaling.load().window_seconds, Scaling.load().port, Scaling.load().names) == (4.0, 9, ("x", "y"))


def test_the_runtime_reads_the_common_part_of_any_section(file: Path) -> None:
    file.write_text("[scaling]\nwindow_seconds = 7\nport = 9\n")
    assert ServiceSettings.of(ServiceName.SCALING).port == 9
    assert ServiceSettings.of(ServiceName.INTAKE).port == 8470
    assert ServiceSettings.of(ServiceName.QUEUEING).batch_interval_seconds == 0.05
    assert ServiceSettings.of(ServiceName.METRICS).port == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "[scaling]\nwindow_seconds = 0\n",
            "TIDE_SCALING_WINDOW_SECONDS (window_seconds in [scaling] of {file}): Input",
        ),
        ("[scaling]\nwindow = 5\n", "TIDE_SCALING_WINDOW (window in [scaling] of {file}): Extra inputs"),
        ("[scalin]\n", "TIDE_CONFIG={file}: unknown section [scalin]"),
        ("scaling = 5\n", "TIDE_CONFIG={file}: scaling must be a section"),
        ("[scaling\n", "TIDE_CONFIG={file}: "),
    ],
)
def test_a_bad_file_is_told_with_the_name_of_the_setting(file: Path, content: str, message: str) -> None:
    file.write_text(content)
    assert problem_of(Scaling).startswith(message.format(file=file))


def test_a_missing_file_is_told(file: Path) -> None:
    assert str(file) in problem_of(Scaling)


def test_bad_variables_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDE_SCALING_WINDOW_SECONDS", "nan")
    assert problem_of(Scaling).startswith("TIDE_SCALING_WINDOW_SECONDS (window_seconds in [scaling]): ")
    monkeypatch.setenv("TIDE_SCALING_WINDOW_SECOND", "5")
    assert problem_of(Scaling) == "TIDE_SCALING_WINDOW_SECOND: there is no such setting in [scaling]"


def test_the_common_part_does_not_mind_what_only_the_service_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDE_SCALING_WINDOW_SECONDS", "5")
    assert ServiceSettings.of(ServiceName.SCALING).lease_seconds == 5.0


def test_installation_settings_have_short_names_and_hide_the_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDE_STATE", "/srv/tide")
    monkeypatch.setenv("TIDE_DATABASE_URL", "postgresql://u:hunter2@h/d")
    settings = InstallationSettings.load()
    assert settings.state == Path("/srv/tide")
    assert settings.key_file == Path("/srv/tide/signing.key")
    assert "hunter2" not in repr(settings)


def test_the_state_folder_of_root_is_not_in_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert default_state_directory() == Path("/var/lib/tidewright")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_STATE_HOME", "/x/state")
    assert default_state_directory() == Path("/x/state/tidewright")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/ada")
    assert default_state_directory() == Path("/home/ada/.local/state/tidewright")
