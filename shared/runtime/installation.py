"""What all services of an installation share, made from its settings."""

from dataclasses import dataclass
from pathlib import Path

from shared.bus.brokers import Brokers
from shared.db.embedded import EmbeddedPostgres
from shared.db.state import prepare_state_directory
from shared.settings import InstallationSettings
from shared.signing import load_signing_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """Where state, database and key are. The database is there and migrated, or soon will be."""

    state_directory: Path
    database_url: str
    signing_key: bytes
    brokers: Brokers | None = None
    """None: events are carried by Postgres alone."""

    @classmethod
    def of(cls, settings: InstallationSettings) -> "Installation":
        """Makes state folder and key if they are missing; starts nothing. Raises SettingsError."""
        state = prepare_state_directory(settings.state)
        given = settings.database_url
        return cls(
            state_directory=state,
            database_url=given.get_secret_value() if given else EmbeddedPostgres(state=state).url,
            signing_key=load_signing_key(settings.key_file),
            brokers=Brokers.of(settings),
        )
