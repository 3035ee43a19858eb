"""Why a workload that ``plan`` looked at goes on waiting, what would unblock it, and when that may be."""

from schemas.events.allocation import StartEstimate
from schemas.resources import Resources, total
from schemas.vocabulary import FlavorName, WaitCode
from services.queueing.core import ledger
from services.queueing.core.desk import Desk, promises_ahead
from services.queueing.core.gang import minimum_of, size_of
from services.queueing.core.placement import Vector, can_never_hold, is_within, place, reserve
from services.queueing.core.values import Promise, Standing, WaitReason, Workload
from services.queueing.core.wording import amount_text, job_text, workers_text


def why_waiting(desk: Desk, workload: Workload) -> WaitReason:
    """The binding reason, after all decisions of the plan."""
    promise = desk.promises.get(workload.job_id)
    if promise is not None:
        return _room_coming(desk, workload, promise)
    if not desk.capacity.lost_nodes and _never_fits(desk, workload):
        return _never(desk, workload)
    flavor = min(desk.flavors_for(workload), default=None)
    if flavor is not None and _fits_by_sum(desk, workload, flavor):
        return _placement(desk, workload, flavor)
    return _no_room(desk, workload, flavor)


def _room_coming(desk: Desk, workload: Workload, promise: Promise) -> WaitReason:
    leaving = [
        w
        for w in desk.workloads.values()
        if w.flavor == promise.flavor and w.standing is not Standing.WAITING and ledger.charge_of(w) != w.granted
    ]
    names = [job_text(w, reader=workload.tenant) for w in leaving]
    overdue = [w.overdue for w in leaving if w.overdue]
    grace = max((w.grace_seconds for w in leaving), default=0.0)
    late = f"; {'; '.join(overdue)}" if overdue else ""
    estimate = None
    if leaving and not overdue:
        estimate = StartEstimate(seconds=grace, basis=f"those that leave have at most {grace:g} s to do so")
    whose = ", ".join(dict.fromkeys(names)) or "jobs ahead of it"
    return WaitReason(
        code=WaitCode.ROOM_COMING,
        detail=f"{_need_text(workload)}; the room is promised to it and is on its way from {whose}{late}",
        unblocked_by=f"{whose} leaving the room",
        estimate=estimate,
    )


def _never(desk: Desk, workload: Workload) -> WaitReason:
    largest = max(
        (node.allocatable for node in desk.capacity.nodes), key=lambda size: size.amounts, default=Resources()
    )
    everything = total(node.allocatable for node in desk.capacity.nodes)
    count = len(desk.capacity.nodes)
    return WaitReason(
        code=WaitCode.NEVER_FITS,
        detail=f"{_need_text(workload)}; {_nodes_text(count)} {amount_text(everything)} in all, the largest "
        f"{amount_text(largest)}, and cannot hold that even when empty",
        unblocked_by="a lower minimum, smaller workers, or more and larger nodes",
    )


def _placement(desk: Desk, workload: Workload, flavor: FlavorName) -> WaitReason:
    free = _amounts(desk, flavor, desk.room_coming(flavor).spare)
    return WaitReason(
        code=WaitCode.PLACEMENT,
        detail=f"{_need_text(workload)}; {amount_text(free)} are free on {flavor}, but scattered over nodes so that "
        f"its members do not fit",
        unblocked_by="room coming free on nodes that already have some",
    )


def _no_room(desk: Desk, workload: Workload, flavor: FlavorName | None) -> WaitReason:
    if flavor is None:
        lost = len(desk.capacity.lost_nodes)
        return WaitReason(
            code=WaitCode.NO_ROOM,
            detail=f"{_need_text(workload)}; no node answers ({lost} lost)",
            unblocked_by="a node coming back",
        )
    site = desk.sites[flavor]
    promises = promises_ahead(desk, workload, flavor)
    room = desk.room_coming(flavor)
    free = _amounts(desk, flavor, room.spare)
    ahead = f", {len(promises)} more urgent waiting ones have a promise" if promises else ""
    return WaitReason(
        code=WaitCode.NO_ROOM,
        detail=f"{_need_text(workload)}; of {amount_text(_amounts(desk, flavor, site.total))} on {flavor} "
        f"{amount_text(free)} are free, the rest is held by jobs that need not make room for it{ahead}",
        unblocked_by="a job that ends or shrinks, or a higher priority: tide priority",
    )


def _need_text(workload: Workload) -> str:
    """``needs 4 slots for its minimum of 2 workers``."""
    size = amount_text(size_of(workload, minimum_of(workload)))
    fixed = sum(role.count for role in workload.roles if not role.elastic)
    others = f" and {fixed} other members" if fixed else ""
    return f"needs {size} for its minimum of {workers_text(workload.request.workers_min)}{others}"


def _nodes_text(count: int) -> str:
    return "the only node has" if count == 1 else f"the {count} nodes have"


def _never_fits(desk: Desk, workload: Workload) -> bool:
    members = [(role.resources, n) for role, n in zip(workload.roles, minimum_of(workload), strict=True)]
    return all(can_never_hold(site, members) for site in desk.sites.values())


def _fits_by_sum(desk: Desk, workload: Workload, flavor: FlavorName) -> bool:
    """Whether the sums would do: then it is the nodes that do not fit."""
    room = desk.room_coming(flavor)
    for promise in promises_ahead(desk, workload, flavor):
        room = reserve(room, desk.vectors(promise.job_id, promise.members, flavor))
    members = desk.vectors(workload.job_id, minimum_of(workload), flavor)
    return is_within(reserve(room, members).spare) and place(room, members) is None


def _amounts(desk: Desk, flavor: FlavorName, vector: Vector) -> Resources:
    return Resources(dict(zip(desk.sites[flavor].names, vector, strict=True))).clipped()
