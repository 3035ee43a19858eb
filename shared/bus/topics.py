"""The topics of an installation: made where they are missing, refused where they cannot be used."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError, TopicAlreadyExistsError, for_code

from schemas.vocabulary import Topic
from shared.bus.brokers import Brokers
from shared.bus.partitions import partitions_of
from shared.errors import Unavailable
from shared.settings import SettingsError

RETENTION_MS: Final = 7 * 24 * 3_600_000
MESSAGE_BYTES_MAX: Final = 4 * 1024 * 1024
"""A submission is at most 1 MiB; its event carries the whole job and a little more."""
_CONFIGURATION: Final = {
    "cleanup.policy": "delete",
    "retention.ms": str(RETENTION_MS),
    "max.message.bytes": str(MESSAGE_BYTES_MAX),
    "message.timestamp.type": "LogAppendTime",
}
"""None is compacted: no state is rebuilt from a topic."""
_SECONDS: Final = 15.0
_LOOK_SECONDS: Final = 0.1


async def ensure_topics(
    brokers: Brokers, *, before_making: Callable[[Sequence[Topic]], Awaitable[None]] | None = None
) -> None:
    """Make the topics that are missing. Raises Unavailable, or SettingsError for a topic that cannot be used.

    ``before_making`` is told which, while nobody can write them yet.
    """
    admin = AIOKafkaAdminClient(**brokers.options(), request_timeout_ms=int(_SECONDS * 1000))
    try:
        async with asyncio.timeout(_SECONDS):
            await admin.start()
            found = await _partition_counts(admin, brokers)
            while missing := [topic for topic in Topic if topic not in found]:
                if before_making is not None:
                    await before_making(missing)
                await _make(admin, brokers, missing)
                await asyncio.sleep(_LOOK_SECONDS)  # a new topic is told a little later
                found = await _partition_counts(admin, brokers)
    except (KafkaError, OSError, TimeoutError) as exc:
        raise Unavailable(f"Kafka ({brokers.servers}) does not answer: {told(exc)}") from exc
    finally:
        await admin.close()
    check_counts(found, brokers)


def check_counts(found: Mapping[Topic, int], brokers: Brokers) -> None:
    """Raises SettingsError naming every topic whose number of partitions is another than ours."""
    wrong = [
        f"topic {brokers.name_of(topic)} has {found[topic]} partitions and {partitions_of(topic)} are needed: keys"
        " would be found in another place. Delete it while the services are stopped (their tables hold all state), or"
        " choose other topics with TIDE_KAFKA_PREFIX"
        for topic in Topic
        if topic in found and found[topic] != partitions_of(topic)
    ]
    if wrong:
        raise SettingsError("\n".join(wrong))


def told(exc: BaseException) -> str:
    """One line for people; a password is never in it."""
    return f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__


async def _partition_counts(admin: AIOKafkaAdminClient, brokers: Brokers) -> dict[Topic, int]:
    names = {brokers.name_of(topic): topic for topic in Topic}
    described = await admin.describe_topics(list(names))
    return {names[each["topic"]]: len(each["partitions"]) for each in described if each["error_code"] == 0}


async def _make(admin: AIOKafkaAdminClient, brokers: Brokers, topics: list[Topic]) -> None:
    answer = await admin.create_topics(
        [
            NewTopic(
                name=brokers.name_of(topic),
                num_partitions=partitions_of(topic),
                replication_factor=brokers.replicas,
                topic_configs=_CONFIGURATION,
            )
            for topic in topics
        ]
    )
    for name, code, *detail in answer.topic_errors:
        error = for_code(code)
        if code != 0 and error is not TopicAlreadyExistsError:  # another process was first
            raise error(f"{name}: {detail[0] if detail and detail[0] else 'could not be made'}")
