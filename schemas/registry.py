"""Every event type: its data class, its codec, its topic. The only place that maps type names to classes."""

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from pydantic import TypeAdapter

from schemas.events.allocation import (
    AllocationClosed,
    AllocationEvicted,
    AllocationGranted,
    AllocationResized,
    AllocationWaiting,
    QueueObserved,
)
from schemas.events.capacity import CapacityObserved
from schemas.events.job import JobChanged, JobEnded, JobSubmitted
from schemas.events.metric import MetricWindow
from schemas.events.scaling import ScalingProposed
from schemas.events.worker import (
    Checkpointed,
    CheckpointFailed,
    GroupChanged,
    GroupEnded,
    GroupStarted,
    RoomFreed,
    RoomOverdue,
    StartFailed,
)

JobData: TypeAlias = JobSubmitted | JobChanged | JobEnded
AllocationData: TypeAlias = (
    AllocationGranted | AllocationResized | AllocationEvicted | AllocationClosed | AllocationWaiting | QueueObserved
)
WorkerData: TypeAlias = (
    GroupStarted | GroupChanged | RoomFreed | RoomOverdue | StartFailed | Checkpointed | CheckpointFailed | GroupEnded
)
EventData: TypeAlias = JobData | AllocationData | WorkerData | MetricWindow | ScalingProposed | CapacityObserved

EVENT_CLASSES: Final[tuple[type[EventData], ...]] = (
    JobSubmitted,
    JobChanged,
    JobEnded,
    AllocationGranted,
    AllocationResized,
    AllocationEvicted,
    AllocationClosed,
    AllocationWaiting,
    QueueObserved,
    GroupStarted,
    GroupChanged,
    RoomFreed,
    RoomOverdue,
    StartFailed,
    Checkpointed,
    CheckpointFailed,
    GroupEnded,
    MetricWindow,
    ScalingProposed,
    CapacityObserved,
)
ADAPTERS: Final[Mapping[str, TypeAdapter[Any]]] = {cls.TYPE: TypeAdapter(cls) for cls in EVENT_CLASSES}


def encode(data: EventData) -> bytes:
    """Compact JSON of the event's data."""
    return ADAPTERS[data.TYPE].dump_json(data)


def decode(event_type: str, payload: bytes) -> EventData:
    """Inverse of ``encode``; unknown fields are ignored.

    Raises KeyError for a type that is not in the registry, pydantic.ValidationError for a bad payload.
    """
    data: EventData = ADAPTERS[event_type].validate_json(payload)
    return data
