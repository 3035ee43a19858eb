"""Settings from a TOML file and the environment, with errors that name the setting and where to set it."""

import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from pydantic_settings import SettingsError as SourceError

from schemas.vocabulary import ServiceName

CONFIG_VARIABLE: Final = "TIDE_CONFIG"
"""Names the TOML file; without it there is none."""
SECRET_BYTES: Final = 32
_SECTIONS: Final = frozenset({"installation", "launch", *ServiceName})
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class SettingsError(Exception):
    """Settings that cannot be used: one line per problem, each naming the setting."""


class SectionSettings(BaseSettings):
    """One section of the TOML file. The environment wins: ``TIDE_<SECTION>_<FIELD>``.

    Use ``load``: it turns every problem into a ``SettingsError``, unknown names included.
    """

    model_config = SettingsConfigDict(frozen=True, extra="forbid", validate_default=True)
    SECTION: ClassVar[str]

    @classmethod
    def environment_prefix(cls) -> str:
        return f"TIDE_{cls.SECTION.upper()}_"

    @classmethod
    def load(cls) -> Self:
        """Read file and environment. Raises SettingsError."""
        try:
            problems = _unknown_variables(cls)
            if not problems:
                return cls()
        except ValidationError as exc:
            problems = [_problem(cls, error["loc"], error["msg"]) for error in exc.errors(include_input=False)]
        except SourceError as exc:
            problems = [str(exc)]
        raise SettingsError("\n".join(problems))

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        environment = EnvSettingsSource(settings_cls, env_prefix=cls.environment_prefix())
        return init_settings, environment, _FileSection(settings_cls, cls.SECTION)


def default_state_directory() -> Path:
    """``/var/lib/tidewright`` for root, else the user's state folder (XDG)."""
    if os.geteuid() == 0:
        return Path("/var/lib/tidewright")
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "tidewright"


class InstallationSettings(SectionSettings):
    """What all services of an installation share."""

    SECTION = "installation"

    state: Path = Field(default_factory=default_state_directory)
    """State folder. Environment: ``TIDE_STATE``."""
    database_url: SecretStr | None = None
    """``postgresql://user:password@host:port/name``; None: the embedded server in the state folder."""
    kafka_servers: str | None = None
    """``host:port,host:port``: events are carried by Kafka; None: by Postgres alone."""
    kafka_prefix: Annotated[str, Field(pattern=r"^[a-zA-Z0-9._-]{0,100}$")] = ""
    """Before the name of every topic, for several installations on one broker."""
    kafka_security: Literal["plaintext", "ssl", "sasl_plaintext", "sasl_ssl"] = "plaintext"
    kafka_mechanism: Literal["SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN"] = "SCRAM-SHA-512"
    kafka_username: str | None = None
    kafka_password_file: Path | None = None
    kafka_ca_file: Path | None = None
    """Certificates that the brokers' are checked with; None: those of this machine."""
    kafka_replicas: Annotated[int, Field(ge=1, le=32)] = 1
    """Copies of each partition of the topics that are made."""
    signing_key_file: Path | None = None
    """None: ``signing.key`` in the state folder, made when it is missing."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "console"] = "json"

    @classmethod
    def environment_prefix(cls) -> str:
        return "TIDE_"

    @property
    def key_file(self) -> Path:
        return self.signing_key_file or self.state / "signing.key"


class ServiceSettings(SectionSettings):
    """What every service has; a service's own settings are a subclass with its section."""

    SECTION: ClassVar[str] = ""

    host: str = "127.0.0.1"
    """Address that the service's HTTP listens on."""
    port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """0: any free port, found by the others through the lease row."""
    advertise_host: str | None = None
    """Host name under which others reach it; None: ``host``, or this machine's name where that is 0.0.0.0."""
    body_bytes_max: Annotated[int, Field(ge=1_024)] = 1_048_576
    lease_seconds: Positive = 5.0
    lease_renew_seconds: Positive = 1.5
    lease_retry_seconds: Positive = 0.25
    """How often a standby looks whether the lease is free."""
    batch_events_max: Annotated[int, Field(ge=1, le=10_000)] = 500
    batch_interval_seconds: NotNegative = 0.0
    """At least so long from the start of one batch to the start of the next."""
    poll_seconds_max: Positive = 0.25
    """Longest wait between two looks at the log when nothing wakes the reader."""
    handler_attempts_max: Annotated[int, Field(ge=1, le=100)] = 5
    """A record whose handler failed so often alone is quarantined."""
    backoff_seconds_max: Positive = 5.0
    drain_seconds: Positive = 10.0
    """Time for an ordered stop; what is left then is cut off."""
    pool_connections_max: Annotated[int, Field(ge=2, le=200)] = 8
    pool_wait_seconds: Positive = 5.0
    connect_seconds: Positive = 5.0
    send_seconds: Positive = 10.0
    """Kafka has to acknowledge what the relay sends within so long; then it is sent again."""
    statement_seconds: Positive = 30.0
    lock_seconds: Positive = 5.0
    idle_in_transaction_seconds: Positive = 15.0
    """Postgres ends a transaction that is idle for so long: an open one holds back every reader of the log."""

    @classmethod
    def of(cls, service: ServiceName) -> "ServiceSettings":
        """The common settings of a service, whatever else its section holds. Raises SettingsError."""
        return _COMMON[service].load()


class _Intake(ServiceSettings):
    port: Annotated[int, Field(ge=0, le=65_535)] = 8470
    """The public door."""


class _Queueing(ServiceSettings):
    batch_interval_seconds: NotNegative = 0.05
    """A plan costs more than a batch: events that come together are planned together."""


_OWN_DEFAULTS: Final[dict[ServiceName, type[ServiceSettings]]] = {
    ServiceName.INTAKE: _Intake,
    ServiceName.QUEUEING: _Queueing,
}


def _common(service: ServiceName) -> type[ServiceSettings]:
    fields: dict[str, Any] = {
        "SECTION": service.value,
        "__annotations__": {"SECTION": ClassVar[str]},
        "__module__": __name__,
        "model_config": SettingsConfigDict(extra="ignore"),
    }
    base = _OWN_DEFAULTS.get(service, ServiceSettings)
    return type(f"{service.value.title()}CommonSettings", (base,), fields)


_COMMON: Final = {service: _common(service) for service in ServiceName}


class _FileSection(PydanticBaseSettingsSource):
    """The values of one section of the TOML file."""

    def __init__(self, settings_cls: type[BaseSettings], section: str) -> None:
        super().__init__(settings_cls)
        self._section = section

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self().get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        path = os.environ.get(CONFIG_VARIABLE)
        if not path:
            return {}
        try:
            content = tomllib.loads(Path(path).read_text())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
            raise SourceError(f"{CONFIG_VARIABLE}={path}: {exc}") from exc
        unknown = sorted(set(content) - _SECTIONS)
        if unknown:
            raise SourceError(f"{CONFIG_VARIABLE}={path}: unknown section [{unknown[0]}]")
        values = content.get(self._section, {})
        if not isinstance(values, dict):
            raise SourceError(f"{CONFIG_VARIABLE}={path}: {self._section} must be a section")
        return values


def _unknown_variables(cls: type[SectionSettings]) -> list[str]:
    """Misspelt variables of a service's section; the installation's prefix is too wide to tell."""
    if issubclass(cls, InstallationSettings) or cls.model_config.get("extra") != "forbid":
        return []
    prefix = cls.environment_prefix()
    known = {f"{prefix}{name.upper()}" for name in cls.model_fields}
    names = sorted(name for name in os.environ if name.startswith(prefix) and name not in known)
    return [f"{name}: there is no such setting in [{cls.SECTION}]" for name in names]


def _problem(cls: type[SectionSettings], location: tuple[int | str, ...], message: str) -> str:
    field = ".".join(str(part) for part in location)
    path = os.environ.get(CONFIG_VARIABLE)
    place = f"{field} in [{cls.SECTION}]" + (f" of {path}" if path else "")
    return f"{cls.environment_prefix()}{field.upper()} ({place}): {message}"
