"""What windows amount to, and that what is missing stays missing."""

import pytest
from unit.metrics_builders import RULES, S, make_sample, make_track, started

from schemas.vocabulary import UtilisationMeasure
from services.metrics.core.groups import Verdict, absorb, close_due, due_us, end_attempt


def reported(track, *samples, now_us):
    track, verdicts = absorb(track, samples, now_us=now_us, rules=RULES)
    assert set(verdicts) <= {Verdict.COUNTED}
    return track


def seconds_of(track, *, ranks, first=1, count=5, **changes):
    """Reports of ``count`` seconds by these ranks, each a second long."""
    for second in range(first, first + count):
        samples = [make_sample(rank=rank, sequence=second, step=second * 10, **changes) for rank in ranks]
        track = reported(track, *samples, now_us=second * S)
    return track


def closed(track, *, now_us):
    outcome = close_due(track, now_us=now_us, rules=RULES)
    (window,) = outcome.windows
    return outcome.track, window


def test_a_full_window():
    track = seconds_of(make_track(), ranks=(0, 1))
    track, window = closed(track, now_us=5 * S)
    assert (window.members_reporting, window.members_expected, window.window_seconds) == (2, 2, 5.0)
    assert (window.step_seconds, window.sync_seconds, window.input_wait_seconds) == (3.0, 1.0, 0.5)
    assert window.idle_seconds == 0.5
    assert window.utilisation == 0.8  # steps and synchronisation
    assert window.measure is UtilisationMeasure.WALL
    assert window.samples_per_second == 200.0
    assert window.loss == 0.5
    assert window.progress.step == 50
    assert window.progress.remaining_seconds == 95.0  # 950 steps at 10 a second
    assert track.window.opened_us == 5 * S
    assert not track.window.totals
    assert due_us(track, now_us=5 * S, rules=RULES) == 12 * S, "the next one waits for reports, and misses them"


def test_a_window_stays_open_until_its_length_is_over():
    track = seconds_of(make_track(), ranks=(0, 1), count=4)
    assert close_due(track, now_us=5 * S - 1, rules=RULES).windows == ()


def test_a_missing_member_is_waited_for_and_then_missed():
    track = seconds_of(make_track(), ranks=(0,))
    assert due_us(track, now_us=5 * S, rules=RULES) == 7 * S
    assert close_due(track, now_us=6 * S, rules=RULES).windows == ()
    _, window = closed(track, now_us=7 * S)
    assert (window.members_reporting, window.members_expected) == (1, 2)
    assert window.samples_per_second == 100.0, "nothing is made up for the one that is missing"


def test_a_late_report_completes_the_window():
    track = seconds_of(make_track(), ranks=(0, 1), count=4)
    track = seconds_of(track, ranks=(0,), first=5, count=1)
    assert due_us(track, now_us=5 * S, rules=RULES) == 5 * S, "four of five seconds are enough"


def test_a_member_that_reported_for_too_little_of_the_window_is_in_no_mean():
    track = seconds_of(make_track(), ranks=(0,))
    track = reported(track, make_sample(rank=1, loss=1e9, samples=10**6), now_us=5 * S)
    _, window = closed(track, now_us=7 * S)
    assert window.members_reporting == 1
    assert window.loss == 0.5
    assert window.samples_per_second == 100.0


def test_silence_is_published_as_silence():
    _, window = closed(make_track(), now_us=7 * S)
    assert (window.members_reporting, window.members_expected) == (0, 2)
    assert window.utilisation is None
    assert window.step_seconds is None
    assert window.idle_seconds is None
    assert window.samples_per_second is None
    assert window.loss is None
    assert window.progress is None


def test_silence_is_told_once_and_ends_with_the_next_report():
    track, _ = closed(make_track(), now_us=7 * S)
    assert due_us(track, now_us=8 * S, rules=RULES) is None
    assert close_due(track, now_us=60 * S, rules=RULES).windows == ()
    assert absorb(track, [make_sample(world=9)], now_us=60 * S, rules=RULES)[0].is_quiet
    track = reported(track, make_sample(rank=0), make_sample(rank=1), now_us=60 * S)
    track = seconds_of(track, ranks=(0, 1), first=61, count=4)
    _, window = closed(track, now_us=65 * S)
    assert (round(window.window_seconds, 3), window.members_reporting) == (5.0, 2)


def test_a_new_generation_ends_the_silence():
    track, _ = closed(make_track(), now_us=7 * S)
    grown = started(track, workers=3, generation=2, now_us=8 * S).track
    assert due_us(grown, now_us=8 * S, rules=RULES) == 15 * S


def test_a_pause_counts_as_idle():
    track = seconds_of(make_track(), ranks=(0, 1), step_us=0, sync_us=0, input_wait_us=0, steps=0, samples=0)
    _, window = closed(track, now_us=5 * S)
    assert window.idle_seconds == 5.0
    assert window.utilisation == 0.0
    assert window.progress.remaining_seconds is None, "an unknown rate is not a rate of zero"


def test_nvml_counts_only_if_every_member_has_it():
    nvml = {"measure": UtilisationMeasure.NVML, "utilisation_ppm": 970_000}
    track = seconds_of(make_track(), ranks=(0, 1), **nvml)
    _, window = closed(track, now_us=5 * S)
    assert (window.utilisation, window.measure) == (0.97, UtilisationMeasure.NVML)
    mixed = seconds_of(seconds_of(make_track(), ranks=(0,), **nvml), ranks=(1,))
    _, window = closed(mixed, now_us=5 * S)
    assert (window.utilisation, window.measure) == (0.8, UtilisationMeasure.WALL)


def test_a_report_from_before_the_window_counts_nowhere():
    track = seconds_of(make_track(), ranks=(0, 1))
    track, _ = closed(track, now_us=5 * S)
    stopped = make_sample(sequence=6, wall_us=60 * S, step_us=59 * S)
    track, verdicts = absorb(track, [stopped], now_us=6 * S, rules=RULES)
    assert verdicts == (Verdict.LATE,)
    assert not track.window.totals
    assert absorb(track, [stopped], now_us=6 * S, rules=RULES)[1] == (Verdict.REPEATED,)


def test_windows_tile_a_generation_over_an_outage_of_metrics():
    """One long window; whoever could not report in it does not count as reporting."""
    track = seconds_of(make_track(), ranks=(0, 1), count=3)
    track = reported(track, make_sample(sequence=9, rank=0), now_us=40 * S)
    _, window = closed(track, now_us=40 * S)
    assert window.window_seconds == 40.0
    assert window.members_reporting == 0


def test_a_new_generation_closes_the_window_of_the_old_one():
    track = seconds_of(make_track(), ranks=(0, 1), count=3)
    outcome = started(track, workers=4, generation=2, now_us=3 * S)
    (window,) = outcome.windows
    assert (window.generation, window.members_expected, window.window_seconds) == (1, 2, 3.0)
    assert (outcome.track.generation, outcome.track.workers) == (2, 4)
    assert outcome.track.window.opened_us == 3 * S
    assert started(make_track(), workers=4, generation=2, now_us=3 * S).windows == (), "nothing was reported"


def test_old_news_of_a_group_changes_nothing():
    track = make_track(generation=5)
    for attempt, generation in ((1, 4), (1, 5)):
        assert started(track, workers=9, attempt=attempt, generation=generation, now_us=S).track is track
    ended = end_attempt(track, attempt=1, now_us=S, rules=RULES).track
    assert started(ended, workers=9, attempt=1, generation=6, now_us=S).track is ended


def test_the_end_of_an_attempt_publishes_what_was_left():
    track = seconds_of(make_track(), ranks=(0, 1), count=2)
    outcome = end_attempt(track, attempt=1, now_us=2 * S, rules=RULES)
    assert [window.progress.step for window in outcome.windows] == [20]
    assert len(outcome.points) == 1
    assert outcome.track.window is None
    assert absorb(outcome.track, [make_sample(sequence=9)], now_us=3 * S, rules=RULES)[1] == (Verdict.OLDER,)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"generation": 2}, Verdict.OLDER),
        ({"attempt": 1}, Verdict.OLDER),
        ({"world": 3}, Verdict.INCONSISTENT),
        ({"member": "j1/worker/7/1"}, Verdict.INCONSISTENT),
        ({"sequence": 5}, Verdict.REPEATED),
        ({"sequence": 4}, Verdict.REPEATED),
        ({"generation": 4}, Verdict.AHEAD),
        ({"attempt": 3}, Verdict.AHEAD),
        ({"sequence": 6}, Verdict.COUNTED),
    ],
)
def test_fences(changes, verdict):
    group = {"attempt": 2, "generation": 3}
    track = reported(make_track(**group), make_sample(sequence=5, **group), now_us=S)
    after, verdicts = absorb(track, [make_sample(**{"sequence": 6, **group, **changes})], now_us=2 * S, rules=RULES)
    assert verdicts == (verdict,)
    assert (after.window == track.window) is (verdict is not Verdict.COUNTED)


def test_reports_of_a_newer_generation_wait_for_its_event():
    track, verdicts = absorb(make_track(), [make_sample(generation=2, world=3)], now_us=S, rules=RULES)
    assert verdicts == (Verdict.AHEAD,)
    assert not track.window.totals
    grown = started(track, workers=3, generation=2, now_us=2 * S).track
    assert grown.window.totals[0].wall_us == S
    assert grown.window.opened_us == S - 1
    assert grown.aside == ()


def test_they_wait_for_a_bounded_time_and_in_a_bounded_number():
    track = make_track()
    ahead = [make_sample(generation=2, world=3, sequence=n) for n in range(RULES.aside_max + 2)]
    track, verdicts = absorb(track, ahead, now_us=S, rules=RULES)
    assert verdicts[-2:] == (Verdict.CROWDED, Verdict.CROWDED)
    assert len(track.aside) == RULES.aside_max
    late = started(track, workers=3, generation=2, now_us=S + RULES.window.reach_us + 1).track
    assert not late.window.totals
    assert absorb(track, [], now_us=20 * S, rules=RULES)[0].aside == ()
