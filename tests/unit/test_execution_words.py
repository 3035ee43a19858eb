"""What a trainer's words make of the report of its member."""

from services.execution.core.seen import Report
from services.execution.membership.words import apply_message
from tidewright import protocol


def test_finished_says_in_which_group_also_if_nothing_else_was_heard_of_it():
    fresh = Report(connected=True, heard_at=1.0, progressed_at=1.0, waiting=True)
    after = apply_message(fresh, protocol.Finished(generation=4, step=12), now=2.0)
    assert (after.generation, after.step, after.finished_step, after.waiting) == (4, 12, 12, False)
    assert after.heard_at == after.progressed_at == 2.0
