"""How an installation reaches its Kafka brokers: addresses, names of topics, security."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import SecretStr

from schemas.vocabulary import Topic
from shared.settings import InstallationSettings, SettingsError

CLIENT: Final = "tidewright"


@dataclass(frozen=True, slots=True, kw_only=True)
class Brokers:
    """The brokers and what a client needs to talk to them."""

    servers: str
    prefix: str = ""
    replicas: int = 1
    security: str = "plaintext"
    mechanism: str = "SCRAM-SHA-512"
    username: str | None = None
    password: SecretStr | None = None
    ca_file: Path | None = None

    @classmethod
    def of(cls, settings: InstallationSettings) -> "Brokers | None":
        """None where events are carried by Postgres alone. Raises SettingsError naming the setting."""
        if not settings.kafka_servers:
            return None
        for address in settings.kafka_servers.split(","):
            host, _, port = address.strip().rpartition(":")
            if not (host and port.isdigit() and 0 < int(port) < 65_536):
                raise SettingsError(f"TIDE_KAFKA_SERVERS: host:port[,host:port...] is needed, not {address!r}")
        return cls(
            servers=settings.kafka_servers,
            prefix=settings.kafka_prefix,
            replicas=settings.kafka_replicas,
            security=settings.kafka_security,
            mechanism=settings.kafka_mechanism,
            username=settings.kafka_username,
            password=_password(settings),
            ca_file=settings.kafka_ca_file,
        )

    def name_of(self, topic: Topic) -> str:
        return f"{self.prefix}{topic.value}"

    def topic_of(self, name: str) -> Topic:
        """Inverse of ``name_of``. Raises ValueError."""
        return Topic(name.removeprefix(self.prefix))

    def options(self) -> dict[str, Any]:
        """Arguments of every client of aiokafka. Raises SettingsError for certificates that cannot be read."""
        found: dict[str, Any] = {
            "bootstrap_servers": [address.strip() for address in self.servers.split(",")],
            "client_id": CLIENT,
            "security_protocol": self.security.upper(),
        }
        if self.security in ("ssl", "sasl_ssl"):
            try:
                found["ssl_context"] = ssl.create_default_context(cafile=self.ca_file)
            except OSError as exc:
                raise SettingsError(f"TIDE_KAFKA_CA_FILE={self.ca_file}: {exc}") from exc
        if self.security.startswith("sasl"):
            found["sasl_mechanism"] = self.mechanism
            found["sasl_plain_username"] = self.username
            found["sasl_plain_password"] = self.password.get_secret_value() if self.password else None
        return found


def _password(settings: InstallationSettings) -> SecretStr | None:
    if not settings.kafka_security.startswith("sasl"):
        return None
    if not settings.kafka_username or settings.kafka_password_file is None:
        raise SettingsError(
            f"TIDE_KAFKA_SECURITY={settings.kafka_security} needs TIDE_KAFKA_USERNAME and TIDE_KAFKA_PASSWORD_FILE"
        )
    try:
        return SecretStr(settings.kafka_password_file.read_text().strip())
    except (OSError, UnicodeDecodeError) as exc:
        raise SettingsError(f"TIDE_KAFKA_PASSWORD_FILE={settings.kafka_password_file}: {exc}") from exc
