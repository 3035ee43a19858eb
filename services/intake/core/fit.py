"""Whether a gang can ever start here: a refusal at the door must be certain, so only what cannot be is refused."""

from dataclasses import dataclass
from typing import Final

from schemas.events.capacity import CapacityObserved, Node
from schemas.events.job import RequestRegister, RoleRequest
from schemas.resources import CPU, MEMORY, MILLI, NVIDIA_GPU, SHM, SLOT, Resources
from schemas.vocabulary import FlavorName
from services.intake.core.quantities import Unit, say_amount

_BYTES: Final = (MEMORY, SHM)
_SAID_AS: Final = {SLOT: "slots", NVIDIA_GPU: "GPUs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NeverFits:
    """Why no arrangement of this cluster holds the gang. ``field``: JSON pointer to what is too large."""

    field: str
    detail: str
    way_out: str


def accelerator_name(capacity: CapacityObserved | None, *, default: str) -> str:
    """What one accelerator counts in: GPUs where a node reports any, else slots, else the setting."""
    if capacity is not None:
        for name in (NVIDIA_GPU, SLOT):
            if any(node.allocatable[name] for node in capacity.nodes):
                return name
    return default


def never_fits(
    roles: tuple[RoleRequest, ...], request: RequestRegister, capacity: CapacityObserved | None
) -> NeverFits | None:
    """None while nothing was reported, and while a node is lost: it may come back with any size.

    Necessary conditions only: for each role, copies of one member that the empty nodes of one flavor hold.
    Cost: roles times nodes.
    """
    if capacity is None or capacity.lost_nodes:
        return None
    for role in roles:
        count = request.workers_min if role.elastic else role.count
        verdict = _role_never_fits(role, count=count, capacity=capacity)
        if verdict is not None:
            return verdict
    return None


def _role_never_fits(role: RoleRequest, *, count: int, capacity: CapacityObserved) -> NeverFits | None:
    if not role.resources or not count:
        return None
    room: dict[FlavorName, int] = {}
    for node in capacity.nodes:
        room[node.flavor] = room.get(node.flavor, 0) + role.resources.at_most(node.allocatable)
    most = max(room.values(), default=0)
    if most >= count:
        return None
    largest = largest_node(capacity)
    names = f"the largest node is {say_node(largest)}" if largest is not None else "no node has been reported"
    if most == 0:
        detail = f"no node can hold one {role.name}: it needs {say_resources(role.resources)}; {names}"
        field, way_out = "/resources", "ask for less per worker"
    else:
        detail = (
            f"the cluster can hold at most {most} of these {role.name}s at once, and the job needs at least "
            f"{count}; each needs {say_resources(role.resources)}; {names}"
        )
        field, way_out = "/workers_min", f"lower workers_min to at most {most}, or ask for less per worker"
    return NeverFits(field=field, detail=detail, way_out=f"{way_out}, or submit with allow_unsatisfiable=true")


def largest_node(capacity: CapacityObserved) -> Node | None:
    """By accelerators, then memory, then cpu; the name decides between equals."""
    return max(
        capacity.nodes,
        key=lambda node: (
            node.allocatable[NVIDIA_GPU] + node.allocatable[SLOT],
            node.allocatable[MEMORY],
            node.allocatable[CPU],
            node.name,
        ),
        default=None,
    )


def say_node(node: Node) -> str:
    return f"{node.name} with {say_resources(node.allocatable)}"


def say_resources(resources: Resources) -> str:
    """For people: ``2 slots, 1.5 cpu, 4Gi memory``."""
    accelerators = [name for name in resources if name not in (CPU, MEMORY, SHM)]
    names = [*accelerators, *(name for name in (CPU, MEMORY, SHM) if resources[name])]
    return ", ".join(_say(name, resources[name]) for name in names) or "nothing"


def _say(name: str, amount: int) -> str:
    if name in _BYTES:
        return say_amount(name, amount, unit=Unit.BYTES)
    word = _SAID_AS.get(name, name)
    if amount == MILLI and word.endswith("s"):
        word = word[:-1]
    return say_amount(word, amount, unit=Unit.MILLI_UNITS)
