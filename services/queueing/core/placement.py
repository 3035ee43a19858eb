"""Where members can stand: sums are not placement, so every grant and promise is packed onto nodes of one flavor.

Members that run count where they stand, those granted and not yet seen are packed freshly. Where a shrinking job
stands on several nodes nobody knows yet which of its members will leave: each leaver then counts as an *island*, a
place of its own size. That is a lower bound, because an island fits wherever its leaver turns out to have stood.
Packing is greedy (largest role first, fullest node that still takes one); every order of the roles is tried for gangs
of up to three roles. For members of one size it is exact, for mixed ones a "no" may be wrong, a "yes" never is.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Final, TypeAlias

from schemas.resources import Resources
from schemas.vocabulary import FlavorName, JobId
from services.queueing.core.values import Capacity

Vector: TypeAlias = tuple[int, ...]
"""Amounts in the order of ``Site.names``; absent resources are 0."""
Members: TypeAlias = tuple[tuple[Vector, int], ...]
"""So many members of such a size."""
_ROLES_PERMUTED_MAX: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """So many members of one role of one job, of this size each, are to be counted."""

    job_id: JobId
    role: str
    size: Resources
    count: int
    is_fresh: bool = False
    """True if those that the report names are of an earlier attempt: all are packed freshly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What is left. ``bins``: how many nodes and islands have so much left each. ``spare``: the sum, which may be
    below 0 where more is charged than there is.
    """

    bins: Mapping[Vector, int]
    spare: Vector
    homeless: int = 0
    """Members that are counted and find no place: a node was lost, or others stand in the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What stands where, and what is to be packed beside it: members of one size are packed as one lot."""

    bins: Mapping[Vector, int]
    fresh: Mapping[Vector, int]
    spare: Vector

    def with_more(self, members: Members) -> "Layout":
        """With these to be packed as well."""
        fresh, spare = dict(self.fresh), self.spare
        for size, count in members:
            fresh[size] = fresh.get(size, 0) + count
            spare = _less(spare, size, count)
        return Layout(bins=self.bins, fresh=fresh, spare=spare)

    def room(self) -> Room:
        """What is left once all are packed, in the order that leaves the fewest without a place.

        Cost: O(sizes x different amounts left), once for each order that is tried.
        """
        best: Room | None = None
        for order in _packing_orders(tuple(self.fresh.items())):
            bins = dict(self.bins)
            homeless = sum(_pack(bins, size, count) for size, count in order)
            if best is None or homeless < best.homeless:
                best = Room(bins=bins, spare=self.spare, homeless=homeless)
            if best.homeless == 0:
                break
        assert best is not None, "there is at least one order, if of nothing"
        return best


class Site:
    """The nodes of one flavor, empty, and where the members of each job stand.

    ``names``: every resource that a node has or a workload asks for, so that what no node has counts as 0.
    """

    def __init__(self, flavor: FlavorName, capacity: Capacity, *, names: tuple[str, ...]) -> None:
        nodes = sorted((n for n in capacity.nodes if n.flavor == flavor), key=lambda node: node.name)
        self.flavor: Final = flavor
        self.names: Final = names
        self._vectors: Final[dict[Resources, Vector]] = {}
        self.allocatable: Final = tuple(self.vector(node.allocatable) for node in nodes)
        self.open: Final = tuple(self.vector((n.allocatable - n.used_by_others).clipped()) for n in nodes)
        self.total: Final = _sum(self.open, len(self.names))
        self.empty: Final = Room(bins=_grouped(self.allocatable), spare=_sum(self.allocatable, len(names)))
        """The nodes with nothing on them, neither ours nor of others."""
        standing: dict[tuple[JobId, str], list[tuple[int, int]]] = {}
        for index, node in enumerate(nodes):
            for held in node.members:
                standing.setdefault((held.job_id, held.role), []).append((index, held.members))
        self.standing: Final[Mapping[tuple[JobId, str], Sequence[tuple[int, int]]]] = standing

    def vector(self, size: Resources) -> Vector:
        """Amounts by ``names``, which must hold every resource that anybody asks for."""
        if size not in self._vectors:
            self._vectors[size] = tuple(size[name] for name in self.names)
        return self._vectors[size]

    def layout(self, claims: Iterable[Claim]) -> Layout:
        """Where ``claims`` stand; their order does not matter. Cost: O(claims + nodes)."""
        bins = list(self.open)
        spare = self.total
        fresh: dict[Vector, int] = {}
        islands: list[Vector] = []
        for claim in claims:
            size = self.vector(claim.size)
            spare = _less(spare, size, claim.count)
            standing = () if claim.is_fresh else self.standing.get((claim.job_id, claim.role), ())
            missing = claim.count - sum(count for _, count in standing)
            if missing >= 0:
                _occupy(bins, standing, size)
                fresh[size] = fresh.get(size, 0) + missing
            elif claim.count > 0:
                _occupy(bins, standing, size)
                if len(standing) == 1:
                    bins[standing[0][0]] = _less(bins[standing[0][0]], size, missing)
                else:
                    islands.extend([size] * -missing)
        return Layout(bins=_grouped((*bins, *islands)), fresh=fresh, spare=spare)

    def stands(self, job_id: JobId, role: str) -> int:
        """Members of a role that the report names."""
        return sum(count for _, count in self.standing.get((job_id, role), ()))


def place(room: Room, members: Members) -> Room | None:
    """What is left once all ``members`` stand; None if they cannot all be packed.

    A resource of which no size asks anything may be overdrawn already; one that a size asks for may not, even where
    its count is 0.
    """
    spare = room.spare
    for size, count in members:
        spare = _less(spare, size, count)
    if not all(left >= 0 or not any(size[i] for size, _ in members) for i, left in enumerate(spare)):
        return None
    for order in _packing_orders(members):
        bins = dict(room.bins)
        if all(_pack(bins, size, count) == 0 for size, count in order):
            return Room(bins=bins, spare=spare)
    return None


def reserve(room: Room, members: Members) -> Room:
    """Take ``members`` off as far as they can be packed, and off the sum in any case."""
    whole = place(room, members)
    if whole is not None:
        return whole
    bins = dict(room.bins)
    spare = room.spare
    for size, count in next(iter(_packing_orders(members)), ()):
        spare = _less(spare, size, count)
        _pack(bins, size, count)
    return Room(bins=bins, spare=spare)


def is_within(spare: Vector) -> bool:
    """True if no component is overdrawn."""
    return all(amount >= 0 for amount in spare)


def can_never_hold(site: Site, members: Sequence[tuple[Resources, int]]) -> bool:
    """True if it is certain that the empty nodes cannot hold them: by sums, or by places for one role alone."""
    room = site.empty
    sized = tuple((site.vector(size), count) for size, count in members)
    spare = room.spare
    for size, count in sized:
        spare = _less(spare, size, count)
        if place(room, ((size, count),)) is None:
            return True
    return not is_within(spare)


def _packing_orders(members: Members) -> Iterable[Members]:
    needed = tuple(m for m in members if m[1] > 0)
    largest_first = tuple(sorted(needed, key=lambda member: member[0], reverse=True))
    return permutations(largest_first) if len(largest_first) <= _ROLES_PERMUTED_MAX else (largest_first,)


def _pack(bins: dict[Vector, int], size: Vector, count: int) -> int:
    """Put up to ``count`` members into ``bins``, fullest first; the number that found no place.

    Cost: O(different amounts left), whatever the number of nodes.
    """
    if count <= 0 or not any(size):
        return 0
    for free in sorted(free for free in bins if _times(size, free) > 0):
        each = _times(size, free)
        filled = min(bins[free], count // each)
        _move(bins, free, _less(free, size, each), filled)
        count -= filled * each
        if 0 < count < each and bins.get(free, 0) > 0:
            _move(bins, free, _less(free, size, count), 1)
            count = 0
        if count == 0:
            break
    return count


def _move(bins: dict[Vector, int], free: Vector, left: Vector, number: int) -> None:
    """So many of the bins with ``free`` have only ``left`` now."""
    if number:
        bins[free] -= number
        if not bins[free]:
            del bins[free]
        bins[left] = bins.get(left, 0) + number


def _grouped(vectors: Iterable[Vector]) -> dict[Vector, int]:
    counts: dict[Vector, int] = {}
    for vector in vectors:
        counts[vector] = counts.get(vector, 0) + 1
    return counts


def _times(size: Vector, free: Vector) -> int:
    """How many members of ``size`` fit into ``free``; ``size`` is not all zero."""
    return min(have // need for need, have in zip(size, free, strict=True) if need > 0)


def _occupy(bins: list[Vector], standing: Sequence[tuple[int, int]], size: Vector) -> None:
    for index, count in standing:
        bins[index] = _less(bins[index], size, count)


def _less(free: Vector, size: Vector, count: int) -> Vector:
    return tuple(have - need * count for have, need in zip(free, size, strict=True))


def _sum(vectors: Iterable[Vector], length: int) -> Vector:
    result = (0,) * length
    for vector in vectors:
        result = _less(result, vector, -1)
    return result
