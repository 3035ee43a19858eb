"""Laws of windows and curves, for any reports in any order."""

from hypothesis import given
from hypothesis import strategies as st
from unit.metrics_builders import RULES, S, make_sample, make_track, started

from schemas.events.metric import MetricWindow, Progress
from schemas.vocabulary import UtilisationMeasure
from services.metrics.core.curves import CurveCursor, plan_point
from services.metrics.core.groups import Verdict, absorb, close_due
from services.metrics.core.signals import fault_of

share = st.sampled_from([0, 100_000, 333_333])


def sample_of(rank, fence, sequence, wall_us, shares, loss, utilisation_ppm):
    """A sound report: its parts are shares of its wall time."""
    world, generation, attempt = fence
    step_us, sync_us, input_wait_us = (wall_us * part // 1_000_000 for part in shares)
    sample = make_sample(
        rank=rank,
        world=world,
        generation=generation,
        attempt=attempt,
        sequence=sequence,
        wall_us=wall_us,
        step_us=step_us,
        sync_us=sync_us,
        input_wait_us=input_wait_us,
        loss=loss,
        utilisation_ppm=utilisation_ppm,
        measure=UtilisationMeasure.WALL if utilisation_ppm is None else UtilisationMeasure.NVML,
    )
    return sample if fault_of(sample, wall_us_max=120 * S, world_max=10) is None else make_sample()


samples = st.builds(
    sample_of,
    st.integers(0, 1),
    st.sampled_from([(2, 1, 1), (2, 1, 1), (2, 1, 1), (3, 1, 1), (2, 2, 1), (2, 3, 1), (2, 1, 2)]),
    st.integers(1, 6),
    st.sampled_from([1, 500_000, S, 3 * S, 60 * S]),
    st.tuples(share, share, share),
    st.sampled_from([None, 0.0, -1e30, 1e30]),
    st.sampled_from([None, 0, 999_999, 1_000_000]),
)


@given(st.lists(samples, max_size=12), st.integers(1, 3))
def test_a_window_never_leaves_its_bounds(batch, workers):
    track, _ = absorb(make_track(workers=workers), batch, now_us=4 * S, rules=RULES)
    (window,) = close_due(track, now_us=7 * S, rules=RULES).windows
    assert 0 <= window.members_reporting <= window.members_expected == workers
    assert (window.utilisation is None) is (window.members_reporting == 0)
    if window.members_reporting:
        assert 0 <= window.utilisation <= 1
        assert window.idle_seconds >= 0
        assert window.samples_per_second >= 0


@given(st.data(), st.lists(samples, max_size=8, unique_by=lambda s: (s.member, s.sequence)))
def test_the_order_of_reports_does_not_matter(data, batch):
    """Of different members: the reports of one arrive in their order, or count as repeats."""
    batch = sorted(batch, key=lambda s: (s.member, s.sequence))
    order = data.draw(st.permutations(range(len(batch))))
    shuffled = sorted((batch[n] for n in order), key=lambda s: s.sequence)
    windows = []
    for arrived in (batch, shuffled):
        track, _ = absorb(make_track(), arrived, now_us=4 * S, rules=RULES)
        windows.append(close_due(track, now_us=7 * S, rules=RULES).windows)
    assert windows[0] == windows[1]


@given(st.lists(samples, max_size=8), samples)
def test_what_does_not_count_changes_no_window(batch, other):
    track, _ = absorb(make_track(), batch, now_us=4 * S, rules=RULES)
    after, (verdict,) = absorb(track, [other], now_us=4 * S, rules=RULES)
    if verdict is not Verdict.COUNTED:
        assert after.window == track.window


@given(st.lists(samples, max_size=8))
def test_repeating_a_batch_changes_nothing(batch):
    once, _ = absorb(make_track(), batch, now_us=4 * S, rules=RULES)
    twice, verdicts = absorb(once, batch, now_us=4 * S, rules=RULES)
    assert twice.window == once.window
    assert Verdict.COUNTED not in verdicts


@given(st.lists(st.tuples(st.integers(1, 4), samples), max_size=12))
def test_windows_tile_time(reports):
    """Whatever is reported and whenever: each window begins where the one before ended."""
    track, now_us, covered = make_track(), 0, 0.0
    for pause, sample in reports:
        now_us += pause * S
        outcome = close_due(track, now_us=now_us, rules=RULES)
        covered += sum(window.window_seconds for window in outcome.windows)
        quiet = outcome.track
        track, _ = absorb(quiet, [sample], now_us=now_us, rules=RULES)
        covered += (track.window.opened_us - quiet.window.opened_us) / S  # silence that was told already
        assert track.window.opened_us == quiet.window.opened_us or quiet.is_quiet
        assert round(covered * S) == track.window.opened_us


@given(st.integers(2, 9), st.lists(st.booleans(), max_size=200))
def test_a_curve_is_bounded_evenly_spread_and_keeps_the_last(points_max, ends):
    cursor, kept = CurveCursor(), []
    for step, last in enumerate(ends):
        plan = plan_point(cursor, window_at(step), points_max=points_max, last=last)
        cursor = plan.cursor
        kept += [plan.point] if plan.point else []
        if plan.thinned:
            kept = [point for point in kept if point.index % cursor.stride == 0]
        assert len(kept) <= points_max
        assert all(point.index % (cursor.stride if plan.thinned else 1) == 0 for point in kept)
        if last and not plan.thinned:
            assert kept[-1].step == step
    assert [p.index for p in kept] == sorted({p.index for p in kept})
    if ends:
        assert kept[0].step == 0


def window_at(step):
    return MetricWindow(
        attempt=1,
        generation=1,
        window_seconds=5.0,
        members_reporting=1,
        members_expected=1,
        utilisation=0.5,
        measure=UtilisationMeasure.WALL,
        step_seconds=1.0,
        sync_seconds=1.0,
        input_wait_seconds=1.0,
        idle_seconds=1.0,
        samples_per_second=1.0,
        loss=1.0,
        gradient_noise=None,
        progress=Progress(step=step, total_steps=None, remaining_seconds=None),
    )


@given(st.lists(samples, max_size=8), st.integers(2, 4))
def test_a_report_counts_in_one_generation_at_most(batch, generation):
    track, verdicts = absorb(make_track(), batch, now_us=4 * S, rules=RULES)
    counted = {(s.member, s.sequence) for s, v in zip(batch, verdicts, strict=True) if v is Verdict.COUNTED}
    after = started(track, workers=2, generation=generation, now_us=4 * S).track
    again, verdicts = absorb(after, batch, now_us=4 * S, rules=RULES)
    assert not [
        s
        for s, v in zip(batch, verdicts, strict=True)
        if v is Verdict.COUNTED and (s.member, s.sequence) in counted and s.generation == 1
    ]
    assert again.generation == generation
