"""The threshold policy, case by case; the broken signals of other autoscalers by name."""

import math
from dataclasses import replace

import pytest
from unit.scaling_builders import (
    POLICY,
    S,
    Story,
    allocation_closed,
    changed,
    evicted,
    granted,
    group_changed,
    group_ended,
    group_started,
    resized,
    running,
    submitted,
)

from schemas.vocabulary import Mode, UtilisationMeasure
from services.scaling.core.threshold import Growth, Keep, KeepReason, Propose, percent


def test_above_the_band_for_a_whole_window_doubles():
    story = running().windows(59)
    assert story.last == Keep(reason=KeepReason.WINDOW_NOT_FULL)
    story.windows(1)
    assert story.last == Propose(workers=4, reason="utilisation 93 % (wall) above 85 % for 300 s: 2 → 4")


def test_below_the_band_shrinks_by_the_ratio_rounded_up():
    story = running(4, workers_max=8).windows(60, 0.41, members_reporting=4, members_expected=4)
    assert story.last == Propose(workers=3, reason="utilisation 41 % (wall) below 75 % for 300 s: 4 → 3")


@pytest.mark.parametrize(
    ("size", "utilisation", "wished"),
    [(4, 0.0, 1), (4, 0.2, 1), (4, 0.4, 2), (4, 0.6, 3), (4, 0.7499, 4), (10, 0.72, 9), (1, 0.1, 1)],
)
def test_the_ratio_is_exact(size, utilisation, wished):
    """10 x 0.72 / 0.80 is 9 and not, as in floating point, a little more."""
    story = running(size, workers_max=16)
    story.windows(60, utilisation, members_reporting=size, members_expected=size)
    assert story.sizes == ([] if wished == size else [wished])


@pytest.mark.parametrize("edge", [0.75, 0.80, 0.85])
def test_the_edges_are_inside_the_band(edge):
    story = running(16, workers_max=32).windows(120, edge, members_reporting=16, members_expected=16)
    assert story.last == Keep(reason=KeepReason.SIZE_IS_RIGHT)
    assert story.sizes == []


def test_one_window_inside_the_band_begins_anew():
    story = running().windows(59).windows(1, 0.80).windows(59)
    assert story.sizes == []
    assert story.windows(1).sizes == [4]


def test_growth_stays_within_the_maximum():
    full = {"members_reporting": 3, "members_expected": 3}
    assert running(3, workers_max=5).windows(60, **full).sizes == [5]
    assert running(3, workers_max=3).windows(60, **full).last == Keep(reason=KeepReason.AT_LIMIT)


def test_shrinking_stays_within_the_minimum():
    full = {"members_reporting": 4, "members_expected": 4}
    assert running(4, workers_min=3).windows(60, 0.1, **full).sizes == [3]
    assert running(4, workers_min=4).windows(60, 0.1, **full).last == Keep(reason=KeepReason.AT_LIMIT)


def test_a_job_above_its_maximum_is_not_shrunk_for_being_busy():
    """The limits were lowered below its size: that is queueing's to correct."""
    story = running(4, workers_max=8).tell(changed(2, workers_max=2))
    assert story.windows(60, members_reporting=4, members_expected=4).last == Keep(reason=KeepReason.AT_LIMIT)


def test_growth_by_ratio():
    policy = replace(POLICY, growth=Growth.RATIO)
    full = {"members_reporting": 8, "members_expected": 8}
    assert running(8, policy=policy, workers_max=64).windows(60, 1.0, **full).sizes == [10]
    assert running(1, policy=policy).windows(60, 0.86, members_reporting=1, members_expected=1).sizes == [2]


def test_the_factor_of_one_growth_is_bounded():
    policy = replace(POLICY, growth_ppm_max=1_500_000)
    full = {"members_reporting": 4, "members_expected": 4}
    assert running(4, policy=policy, workers_max=64).windows(60, **full).sizes == [6]


def test_a_proposal_is_made_once_for_an_epoch():
    story = running().windows(200)
    assert story.sizes == [4]
    assert story.last == Keep(reason=KeepReason.ALREADY_PROPOSED)


def test_a_granted_growth_starts_over_at_the_new_size():
    story = running().windows(60).tell(resized(epoch=2, workers=4), group_changed(generation=2, workers=4))
    full = {"generation": 2, "members_reporting": 4, "members_expected": 4}
    story.windows(59, **full)
    assert story.sizes == [4]
    assert story.windows(1, **full).sizes == [4, 8]


def test_a_growth_not_granted_is_withdrawn_when_the_need_is_gone():
    story = running().windows(60).windows(60, 0.80)
    assert story.sizes == [4, 2]
    assert story.proposals[-1][1].reason == "utilisation 80 % (wall) between 75 % and 85 % for 300 s: stays at 2"


def test_what_an_earlier_epoch_asked_for_is_left_to_queueing_to_give_back():
    story = running().windows(60).tell(resized(epoch=2, workers=2), group_changed(generation=2, workers=2))
    assert story.windows(200, 0.80, generation=2).sizes == [4]


@pytest.mark.parametrize("event", [resized(epoch=2, workers=2), granted(epoch=2, attempt=1)])
def test_any_change_of_the_allocation_begins_a_cooldown_and_the_window(event):
    story = running().windows(59).tell(event)
    story.windows(59)
    assert story.last == Keep(reason=KeepReason.COOLDOWN)
    assert story.windows(1).sizes == [4]


def test_a_longer_cooldown_outlasts_the_window():
    policy = replace(POLICY, cooldown_us=600 * S)
    story = running(policy=policy).wait(300).windows(1).tell(resized(epoch=2, workers=2)).windows(119)
    assert story.sizes == []
    assert story.windows(1).sizes == [4]


def test_a_new_generation_begins_the_window():
    story = running().windows(59).tell(group_changed(generation=2, workers=2))
    assert story.windows(59, generation=2).sizes == []
    assert story.windows(1, generation=2).sizes == [4]


def test_a_new_generation_begins_the_window_also_if_its_windows_come_before_its_event():
    story = running().windows(59).windows(1, generation=2).tell(group_changed(generation=2, workers=2))
    assert story.windows(58, generation=2).sizes == []
    assert story.windows(1, generation=2).sizes == [4]


def test_a_late_window_of_an_older_generation_disturbs_nothing():
    story = running().tell(group_changed(generation=2, workers=2)).windows(59, generation=2)
    streak = story.job.streak
    for utilisation in (0.93, 0.1, None):
        story.windows(1, utilisation, generation=1)
        assert story.job.streak == streak


def test_a_new_epoch_begins_the_window_also_without_a_new_generation():
    """Only its minimum changed: the group goes on, and the cooldown is shorter than the window."""
    policy = replace(POLICY, cooldown_us=10 * S)
    story = running(policy=policy).windows(59).tell(resized(epoch=2, workers=2)).windows(59)
    assert story.last == Keep(reason=KeepReason.WINDOW_NOT_FULL)
    assert story.windows(1).sizes == [4]


def test_only_the_last_window_counts_not_all_that_was_ever_measured():
    policy = replace(POLICY, cooldown_us=1_500 * S)
    full = {"members_reporting": 4, "members_expected": 4}
    story = running(4, policy=policy).windows(180, 0.1, **full).windows(60, 0.7, **full)
    assert story.last == Keep(reason=KeepReason.SIZE_IS_RIGHT)


def test_a_resize_under_way_moves_nothing():
    story = running().windows(10).tell(resized(epoch=2, workers=4)).windows(120)
    assert story.last == Keep(reason=KeepReason.RESIZE_UNDER_WAY)


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([changed(2, held=True)], KeepReason.HELD),
        ([changed(2, cancelled=True)], KeepReason.CANCELLED),
        ([evicted(epoch=2)], KeepReason.NOT_GRANTED),
        ([allocation_closed()], KeepReason.NOT_GRANTED),
        ([group_ended()], KeepReason.GROUP_NOT_STARTED),
        ([granted(epoch=2, attempt=2)], KeepReason.GROUP_NOT_STARTED),
    ],
)
def test_who_is_not_running_is_not_judged(events, reason):
    story = running().windows(59).tell(*events).windows(300)
    assert story.last == Keep(reason=reason)
    assert story.sizes == []


def test_a_released_job_begins_the_window():
    story = running().windows(59).tell(changed(2, held=True), changed(3)).windows(59)
    assert story.sizes == []
    assert story.windows(1).sizes == [4]


@pytest.mark.parametrize(
    ("mode", "checkpoint_path", "sizes"),
    [
        (Mode.LIVE, None, [4]),
        (Mode.RESTART, "/checkpoints", [4]),
        (Mode.RESTART, None, []),
        (Mode.FIXED, "/checkpoints", []),
        (Mode.FIXED, None, []),
    ],
)
def test_modes(mode, checkpoint_path, sizes):
    assert running(mode=mode, checkpoint_path=checkpoint_path).windows(60).sizes == sizes


def test_nvml_is_named_and_does_not_mix_with_wall():
    story = running().windows(59, measure=UtilisationMeasure.NVML).windows(1)
    assert story.sizes == []
    story = running().windows(60, 0.8763, measure=UtilisationMeasure.NVML)
    assert story.last.reason == "utilisation 87.6 % (nvml) above 85 % for 300 s: 2 → 4"


@pytest.mark.parametrize(("ppm", "text"), [(850_000, "85 %"), (850_999, "85 %"), (851_000, "85.1 %"), (0, "0 %")])
def test_percent(ppm, text):
    assert percent(ppm) == text


# -- signals that moved other systems ---------------------------------------------------------------------------


@pytest.mark.parametrize("broken", [None, math.nan, math.inf, -math.inf, -0.1, 1.1, 9_300.0])
@pytest.mark.parametrize("before", [0.93, 0.1])
def test_kubernetes_105187_a_broken_metric_never_shrinks_nor_grows(broken, before):
    story = running(4, workers_max=8)
    full = {"members_reporting": 4, "members_expected": 4}
    assert story.windows(59, before, **full).windows(600, broken, **full).sizes == []
    assert story.last == Keep(reason=KeepReason.NO_SIGNAL)
    assert story.windows(59, before, **full).sizes == [], "and it breaks continuity"
    assert len(story.windows(1, before, **full).sizes) == 1


def test_kubernetes_119788_a_stale_metric_never_shrinks():
    """Windows told long after they were measured, in one go: nothing; then the living ones count afresh."""
    story = running(4, workers_max=8)
    full = {"members_reporting": 4, "members_expected": 4}
    assert story.windows(600, 0.1, age_us=16 * S, **full).sizes == []
    assert story.last == Keep(reason=KeepReason.NO_SIGNAL)


def test_a_pause_between_windows_breaks_continuity():
    story = running().windows(59).wait(30).windows(59)
    assert story.sizes == []
    assert story.windows(1).sizes == [4]


def test_a_window_that_averages_over_a_long_time_is_no_continuity():
    story = running().windows(59).windows(1, window_seconds=300.0)
    assert story.sizes == []
    assert story.last == Keep(reason=KeepReason.NO_SIGNAL)


@pytest.mark.parametrize("seconds", [0.0, -5.0, math.nan, math.inf])
def test_a_window_without_a_length_says_nothing(seconds):
    assert running().windows(600, window_seconds=seconds).sizes == []


def test_kubernetes_87199_crashing_workers_never_grow():
    """A worker dies in every window and is replaced at once; whoever lives is busy."""
    story = running()
    for generation in range(2, 60):
        story.windows(59, generation=generation - 1)
        story.tell(group_changed(generation=generation, workers=2, lost=True))
    assert story.sizes == []


def test_kubernetes_87199_missing_workers_never_grow():
    story = running().windows(600, members_reporting=1)
    assert story.sizes == []
    assert story.last == Keep(reason=KeepReason.NO_SIGNAL)


def test_keda_737_a_loss_begins_a_cooldown_of_its_own():
    policy = replace(POLICY, band=replace(POLICY.band, window_us=10 * S))
    story = running(policy=policy).tell(group_changed(generation=2, workers=2, lost=True))
    assert story.windows(59, generation=2).sizes == []
    assert story.windows(1, generation=2).sizes == [4]


def test_ray_50783_starting_slowly_is_not_idleness():
    """A group that has not started reports nothing, or only waiting: nothing is removed meanwhile."""
    story = Story(submitted(workers_max=8), granted(workers=4))
    full = {"members_reporting": 4, "members_expected": 4}
    story.wait(300).windows(120, 0.0, **full)
    assert story.sizes == []
    story.tell(group_started(workers=4)).windows(1, 0.9, **full)
    assert story.sizes == []


def test_more_members_than_there_are_is_no_signal():
    assert running().windows(600, members_reporting=3).sizes == []
    assert running().windows(600, members_reporting=3, members_expected=3).sizes == []


def test_a_fraction_of_the_members_can_be_enough():
    policy = replace(POLICY, band=replace(POLICY.band, reporting_ppm=750_000))
    story = running(4, policy=policy)
    assert story.windows(60, members_reporting=2, members_expected=4).sizes == []
    assert story.windows(60, members_reporting=3, members_expected=4).sizes == [8]
