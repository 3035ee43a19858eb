"""Submissions that share a transaction: which of them are written, and what each is answered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

from schemas.vocabulary import JobId, TenantName


class Keyed(Protocol):
    """What this needs to know of a submission; ``key`` and ``body_hash`` are both None or both given."""

    @property
    def job_id(self) -> JobId: ...

    @property
    def tenant(self) -> TenantName: ...

    @property
    def key(self) -> str | None: ...

    @property
    def body_hash(self) -> bytes | None: ...


K = TypeVar("K", bound=Keyed)


@dataclass(frozen=True, slots=True)
class Created:
    """The job is new."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """The key was used with the same body: this is its job."""

    job_id: JobId


@dataclass(frozen=True, slots=True)
class KeyReused:
    """The key was used with another body."""


Answer: TypeAlias = Created | Repeated | KeyReused


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The job that a key stands for, and the hash of the body that it came with."""

    body_hash: bytes
    job_id: JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class Split(Generic[K]):
    """``leaders`` are written; a follower carries a key that an earlier submission of the batch carries too."""

    leaders: tuple[K, ...]
    followers: tuple[K, ...]


def split_by_key(batch: Sequence[K]) -> Split[K]:
    """In order of arrival: the first with a key leads."""
    seen: set[tuple[TenantName, str]] = set()
    leaders: list[K] = []
    followers: list[K] = []
    for item in batch:
        if item.key is None:
            leaders.append(item)
        elif (item.tenant, item.key) in seen:
            followers.append(item)
        else:
            seen.add((item.tenant, item.key))
            leaders.append(item)
    return Split(leaders=tuple(leaders), followers=tuple(followers))


def answer_to(item: Keyed, holders: Mapping[tuple[TenantName, str], Holder]) -> Answer:
    """After the batch was written; ``holders`` names the job of every key in it."""
    if item.key is None:
        return Created()
    holder = holders[item.tenant, item.key]
    if holder.job_id == item.job_id:
        return Created()
    return Repeated(holder.job_id) if holder.body_hash == item.body_hash else KeyReused()
