"""Events of ``tide.capacity.v1``: what the cluster can hold. Published by execution; key = ``cluster``."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from schemas.resources import Resources
from schemas.vocabulary import FlavorName, JobId, NodeName, Topic


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMembers:
    """How many members of one role of one job stand on a node."""

    job_id: JobId
    role: str
    members: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node that answers. ``allocatable`` already lacks members written off and not yet seen gone."""

    name: NodeName
    flavor: FlavorName
    allocatable: Resources
    used_by_others: Resources
    members: tuple[NodeMembers, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityObserved:
    """What the cluster can hold: a full snapshot that replaces the one before.

    By: execution, when it changed, and every 30 s. For: queueing, intake. ``revision`` only rises.
    """

    TYPE: ClassVar[Literal["tide.capacity.observed.v1"]] = "tide.capacity.observed.v1"
    TOPIC: ClassVar[Topic] = Topic.CAPACITY
    revision: int
    nodes: tuple[Node, ...]
    lost_nodes: tuple[NodeName, ...] = ()
