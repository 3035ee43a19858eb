"""The phase and its flags: every row of the protocol's table, and what topics out of step may show."""

import pytest

from schemas.envelope import Sequence
from schemas.events.worker import RoomFreed
from schemas.vocabulary import DecisionCode, GroupChangeCause, JobFlag, JobPhase, Outcome
from services.intake.core.phase import phase_of
from services.intake.core.readmodel import Registers, fold_event
from tests.unit.intake_builders import (
    closed,
    event,
    evicted,
    granted,
    group_changed,
    group_ended,
    group_started,
    make_request,
    resized,
)


def standing(*told, **request):
    registers = Registers()
    for number, data in enumerate(told, start=1):
        registers = fold_event(registers, event(data, xid=number))
    return phase_of(make_request(**request), registers.grant, registers.group)


def freed(epoch):
    return RoomFreed(epoch=epoch, held=(), capacity_revision=1)


@pytest.mark.parametrize(
    ("told", "request_", "phase"),
    [
        ((), {}, JobPhase.QUEUED),
        ((), {"held": True}, JobPhase.HELD),
        ((granted(),), {}, JobPhase.STARTING),
        ((granted(),), {"held": True}, JobPhase.STARTING),
        ((granted(), group_started()), {}, JobPhase.RUNNING),
        ((granted(), group_started(), evicted()), {}, JobPhase.DRAINING),
        ((granted(), evicted()), {}, JobPhase.DRAINING),
        ((granted(), group_started(), evicted(), group_ended()), {}, JobPhase.QUEUED),
        ((granted(), group_started(), evicted(), group_ended()), {"held": True}, JobPhase.HELD),
        ((granted(), evicted(), group_ended(), granted(epoch=3, attempt=2)), {}, JobPhase.STARTING),
        ((granted(), group_started(), closed()), {}, JobPhase.SUCCEEDED),
        ((granted(), closed(outcome=Outcome.FAILED)), {}, JobPhase.FAILED),
        ((closed(epoch=0, attempt=0, outcome=Outcome.CANCELLED),), {"cancelled": True}, JobPhase.CANCELLED),
        ((granted(), group_started(), group_ended()), {}, JobPhase.RUNNING),
        ((granted(), group_ended()), {}, JobPhase.STARTING),
    ],
)
def test_the_table_of_the_protocol(told, request_, phase):
    assert standing(*told, **request_).phase is phase


@pytest.mark.parametrize(
    ("told", "request_", "flags"),
    [
        ((), {"cancelled": True}, {JobFlag.CANCELLING}),
        ((granted(), group_started()), {}, set()),
        ((granted(), group_started()), {"cancelled": True}, {JobFlag.CANCELLING}),
        ((granted(), group_started(), group_ended()), {}, {JobFlag.ENDING}),
        ((granted(), group_ended()), {}, {JobFlag.ENDING}),
        ((granted(), group_started(), resized()), {}, {JobFlag.RESIZING}),
        ((granted(), group_started(), resized(), group_changed()), {}, {JobFlag.RESIZING}),
        ((granted(), group_started(), resized(), freed(2)), {}, {JobFlag.RESIZING}),
        ((granted(), group_started(), resized(), group_changed(), freed(2)), {}, set()),
        ((granted(), group_started(), resized(before=1, after=1)), {}, set()),
        (
            (
                granted(workers=3),
                group_started(workers=3),
                group_changed(epoch=1, workers=2, cause=GroupChangeCause.MEMBER_LOST),
            ),
            {},
            {JobFlag.RECOVERING, JobFlag.SHORT_OF_WORKERS},
        ),
        (
            (
                granted(workers=3),
                group_started(workers=3),
                group_changed(epoch=1, workers=2, cause=GroupChangeCause.MEMBER_LOST),
                group_changed(epoch=1, generation=3, workers=3, cause=GroupChangeCause.MEMBER_REPLACED),
            ),
            {},
            set(),
        ),
        ((granted(workers=3), group_started(workers=2)), {}, {JobFlag.SHORT_OF_WORKERS}),
        (
            (granted(), group_started(), group_ended(), granted(epoch=2, attempt=2, code=DecisionCode.RETRIED)),
            {},
            {JobFlag.RECOVERING},
        ),
        ((granted(), group_started(), closed()), {"cancelled": True}, set()),
    ],
)
def test_flags(told, request_, flags):
    assert set(standing(*told, **request_).flags) == flags


def test_a_group_that_is_ahead_of_its_grant():
    """The worker topic was read further than the allocation topic: attempt 2 runs, its grant is not read yet."""
    told = (granted(), group_started(), evicted(), group_started(attempt=2, epoch=3, generation=2))
    assert standing(*told).phase is JobPhase.QUEUED
    assert standing(*told, granted(epoch=3, attempt=2)).phase is JobPhase.RUNNING


def test_a_late_word_about_an_earlier_attempt_changes_nothing():
    told = (granted(epoch=3, attempt=2), group_started(attempt=2, epoch=3, generation=2))
    before = standing(*told)
    assert standing(*told, group_ended(attempt=1)) == before
    assert standing(*told, evicted(epoch=2, attempt=1)) == before


def test_nothing_follows_a_close():
    registers = fold_event(Registers(), event(closed(outcome=Outcome.FAILED), xid=5))
    after = fold_event(registers, event(granted(epoch=9, attempt=4), xid=6))
    assert after.grant == registers.grant
    assert Sequence(5, 1) < after.waiting.sequence
