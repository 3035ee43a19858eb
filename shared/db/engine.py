"""Engines: a pool of connections to Postgres under one service's role."""

from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from schemas.vocabulary import ServiceName
from shared.settings import ServiceSettings, SettingsError

_DRIVER: Final = "postgresql+asyncpg"


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What every connection of an engine is set to. Durations in seconds; 0: no limit."""

    application: str
    role: str | None = None
    statement_seconds: float = 0
    lock_seconds: float = 0
    idle_in_transaction_seconds: float = 0
    connect_seconds: float = 10

    def connect_arguments(self) -> dict[str, Any]:
        settings = {
            "application_name": self.application,
            "timezone": "UTC",
            "statement_timeout": _milliseconds(self.statement_seconds),
            "lock_timeout": _milliseconds(self.lock_seconds),
            "idle_in_transaction_session_timeout": _milliseconds(self.idle_in_transaction_seconds),
        }
        if self.role:
            settings["role"] = self.role
        return {"server_settings": settings, "timeout": self.connect_seconds}


def parse_database_url(url: str) -> URL:
    """``postgresql://…`` (or ``postgres://``) as SQLAlchemy wants it. Raises SettingsError, without the password."""
    try:
        parsed = make_url(url)
    except ArgumentError as exc:
        raise SettingsError("the database URL must look like postgresql://user:password@host:port/name") from exc
    if parsed.get_backend_name() not in ("postgresql", "postgres"):
        raise SettingsError(f"the database must be PostgreSQL, not {parsed.get_backend_name()}")
    return parsed.set(drivername=_DRIVER)


def role_of(service: ServiceName) -> str:
    return f"tide_{service.value}"


def session_of(service: ServiceName, settings: ServiceSettings) -> Session:
    return Session(
        application=f"tidewright-{service.value}",
        role=role_of(service),
        statement_seconds=settings.statement_seconds,
        lock_seconds=settings.lock_seconds,
        idle_in_transaction_seconds=settings.idle_in_transaction_seconds,
        connect_seconds=settings.connect_seconds,
    )


def service_engine(url: str, service: ServiceName, settings: ServiceSettings) -> AsyncEngine:
    """The pool of a service. Nothing is connected yet."""
    return create_async_engine(
        parse_database_url(url),
        pool_size=settings.pool_connections_max,
        max_overflow=0,
        pool_timeout=settings.pool_wait_seconds,
        connect_args=session_of(service, settings).connect_arguments(),
        hide_parameters=True,  # errors are logged, and values may be secrets
    )


def plain_engine(url: str, session: Session) -> AsyncEngine:
    """An engine without a pool: each use connects anew."""
    return create_async_engine(
        parse_database_url(url), poolclass=NullPool, connect_args=session.connect_arguments(), hide_parameters=True
    )


def _milliseconds(seconds: float) -> str:
    return f"{round(seconds * 1000)}ms"
