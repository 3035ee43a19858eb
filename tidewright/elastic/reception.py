"""Whose state a group goes on with, and getting it: from the most advanced member, or from what rank 0 loads."""

from dataclasses import dataclass, replace

from tidewright.elastic.agreement import bid
from tidewright.elastic.group import Group
from tidewright.elastic.offers import Formation
from tidewright.elastic.parts import Parts
from tidewright.elastic.transfer import Position, elect, hand_over


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """Where the new group goes on. ``skipped``: checkpoints that were passed over when its state was loaded here."""

    position: Position
    skipped: tuple[str, ...] = ()


def receive(parts: Parts, formation: Formation, group: Group, position: Position, *, is_confirmed: bool) -> Received:
    """Get the state that the new group goes on with. Raises GroupBroken, and then nothing has changed.

    ``position``: what is held here; ``is_confirmed``: it is of a group that has started.
    """
    form = formation.form
    parts.standing.enter_phase("loading")
    own = Received(position=replace(position, resumed_generation=0, resumed_step=0))
    if form.source < 0 and formation.is_source:
        own = Received(position=parts.keeper.load(form), skipped=parts.keeper.skipped)
    if formation.is_source:
        group.announce_source()
    if group.is_solo:
        return own
    with parts.standing.waiting_for_others():
        source = 0
        if form.source >= 0:
            named = formation.is_source
            own_bid = bid(step=position.step, rank=group.rank, may_be_source=named or is_confirmed, is_named=named)
            source = elect(group, own_bid=own_bid)
        got = hand_over(group, source, tracked=parts.tracked, plan=parts.plan, position=own.position)
        return replace(own, position=got)


def catch_up(parts: Parts, group: Group, position: Position) -> Position:
    """All members of a group they come back to get the state of the most advanced. Raises GroupBroken, Dismissed."""
    if group.is_solo:
        return position
    with parts.standing.waiting_for_others():
        source = elect(group, own_bid=_bid_of_equals(group, position))
        return hand_over(group, source, tracked=parts.tracked, plan=parts.plan, position=position)


def see_all_there(parts: Parts, group: Group, position: Position) -> None:
    """Return once every member is known to have applied its last step. Raises GroupBroken, Dismissed."""
    with parts.standing.waiting_for_others():
        elect(group, own_bid=_bid_of_equals(group, position))


def _bid_of_equals(group: Group, position: Position) -> int:
    return bid(step=position.step, rank=group.rank, may_be_source=True, is_named=False)
