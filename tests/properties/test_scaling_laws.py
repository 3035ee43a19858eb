"""Laws of scaling, for any history of one job: told by a judge that knows only the history, not the code."""

from dataclasses import dataclass, replace
from itertools import pairwise

from hypothesis import assume, example, given
from hypothesis import strategies as st
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

from schemas.vocabulary import Mode
from services.scaling.core.threshold import Growth, Propose

SHORT = replace(POLICY, band=replace(POLICY.band, window_us=10 * S, staleness_us=6 * S), cooldown_us=12 * S)
policies = st.sampled_from(
    [
        SHORT,
        replace(SHORT, growth=Growth.RATIO),
        replace(SHORT, growth_ppm_max=1_500_000),
        replace(SHORT, cooldown_us=2 * S),
    ]
)
BROKEN = (
    {"utilisation": None},
    {"utilisation": float("nan")},
    {"utilisation": -0.5},
    {"utilisation": 1.5},
    {"window_seconds": 0.0},
    {"window_seconds": 7.0},
    {"window_seconds": float("nan")},
    {"members_expected": 9, "members_reporting": 9},
    {"members_reporting": 0},
    {"age_us": 7 * S},
)


@dataclass(frozen=True)
class Heard:
    """One thing that happened, as the judge remembers it."""

    at_us: int
    kind: str
    utilisation: float = 0.0
    seconds: float = 0.0
    generation: int = 0


@st.composite
def histories(draw):
    """Commands for ``tell``; drawn so that full windows, changes of size and broken ones all happen often."""
    healthy = st.tuples(
        st.just("windows"), st.integers(1, 4), st.sampled_from([0.1, 0.7, 0.75, 0.8, 0.85, 0.9, 0.9, 1.0])
    )
    command = st.one_of(
        healthy,
        healthy,
        healthy,
        st.tuples(st.just("broken"), st.sampled_from(BROKEN)),
        st.tuples(st.just("wait"), st.sampled_from([1, 6, 12])),
        st.tuples(st.just("resize"), st.integers(1, 5)),
        st.tuples(st.just("limits"), st.integers(1, 3), st.integers(0, 4)),
        st.tuples(st.sampled_from(["lose", "epoch"])),
        st.tuples(st.just("retry")),
        st.tuples(st.sampled_from(["hold", "release", "evict", "end"])),
    )
    return draw(st.lists(command, max_size=14))


class Judged(Story):
    """Tells a history and judges every proposal by what it has heard."""

    def __init__(self, policy, mode=Mode.LIVE):
        super().__init__(submitted(mode=mode, workers_max=6), policy=policy)
        self.limits, self.size, self.epoch, self.attempt, self.generation, self.version = (1, 6), 2, 1, 1, 1, 1
        self.stopped = False
        self.heard = []
        self.tell(granted(), group_started())
        self.hear("changed")

    def hear(self, kind, **facts):
        self.heard.append(Heard(at_us=self.now_us, kind=kind, generation=self.generation, **facts))

    def follow(self, commands):
        for name, *arguments in commands:
            getattr(self, f"on_{name}")(*arguments)
        return self

    def on_windows(self, count, utilisation):
        for _ in range(count):
            facts = {"members_reporting": self.size, "members_expected": self.size}
            before = len(self.proposals)
            self.wait(0)
            self.windows(1, utilisation, attempt=self.attempt, generation=self.generation, **facts)
            self.hear("window", utilisation=utilisation, seconds=5.0)
            if len(self.proposals) > before:
                self.judge(self.proposals[-1][1])

    def on_broken(self, how):
        facts = {"members_reporting": self.size, "members_expected": self.size, "utilisation": 0.93, **how}
        self.windows(1, attempt=self.attempt, generation=self.generation, **facts)
        assert not isinstance(self.last, Propose), "a broken window moved something"
        self.hear("broken")

    def on_wait(self, seconds):
        self.wait(seconds)

    def on_resize(self, size):
        self.epoch, self.size, self.generation = self.epoch + 1, size, self.generation + 1
        self.tell(resized(epoch=self.epoch, workers=size, attempt=self.attempt))
        self.tell(group_changed(generation=self.generation, workers=size, attempt=self.attempt))
        self.hear("changed")

    def on_epoch(self):
        """Only the minimum of the grant changed: the group goes on."""
        self.epoch += 1
        self.tell(resized(epoch=self.epoch, workers=self.size, attempt=self.attempt))
        self.hear("changed")

    def on_limits(self, low, more):
        self.version, self.limits = self.version + 1, (low, low + more)
        self.tell(changed(self.version, workers_min=low, workers_max=low + more, held=self.stopped))

    def on_lose(self):
        self.generation += 1
        self.tell(group_changed(generation=self.generation, workers=self.size, attempt=self.attempt, lost=True))
        self.hear("changed")

    def on_retry(self):
        self.epoch, self.attempt, self.generation = self.epoch + 1, self.attempt + 1, self.generation + 1
        self.tell(granted(epoch=self.epoch, attempt=self.attempt, workers=self.size))
        self.tell(group_started(attempt=self.attempt, generation=self.generation, workers=self.size))
        self.hear("changed")

    def on_hold(self):
        self.version, self.stopped = self.version + 1, True
        self.tell(changed(self.version, held=True, workers_min=self.limits[0], workers_max=self.limits[1]))

    def on_release(self):
        self.version, self.stopped = self.version + 1, False
        self.tell(changed(self.version, workers_min=self.limits[0], workers_max=self.limits[1]))

    def on_evict(self):
        self.epoch += 1
        self.tell(evicted(epoch=self.epoch, attempt=self.attempt), group_ended(attempt=self.attempt))
        self.hear("changed")
        self.hear("ended")

    def on_end(self):
        self.tell(group_ended(attempt=self.attempt))
        self.hear("ended")

    def judge(self, proposal):
        low, high = self.limits
        band = self.policy.band
        assert proposal.workers == self.size or low <= proposal.workers <= high, "outside its limits"
        assert not self.stopped, "a held job moved"
        changes = [heard for heard in self.heard if heard.kind == "changed"]
        assert self.now_us - changes[-1].at_us >= self.policy.cooldown_us, "within the cooldown"
        streak = self.streak()
        assert sum(heard.seconds for heard in streak) * S >= band.window_us, "without a full window"
        newest = streak[-1].utilisation
        if proposal.workers > self.size:
            assert newest * 1_000_000 > band.high_ppm
            grown = self.size * self.policy.growth_ppm_max // 1_000_000
            assert proposal.workers <= max(self.size + 1, grown, low)  # a raised minimum is reached at once
        elif proposal.workers < self.size:
            assert newest * 1_000_000 < band.low_ppm
            assert proposal.workers * 0.8 >= self.size * min(h.utilisation for h in streak) - 1e-9
        else:
            assert band.low_ppm <= newest * 1_000_000 <= band.high_ppm

    def streak(self):
        """The windows at the end of the history with nothing in between, all on one side of the band."""
        tail = []
        for heard in reversed(self.heard):
            if heard.kind != "window" or (tail and heard.generation != tail[-1].generation):
                break
            if tail and (self.side(heard) != self.side(tail[-1]) or tail[-1].at_us - heard.at_us > 11 * S):
                break
            tail.append(heard)
        return tail[::-1]

    def side(self, heard):
        band = self.policy.band
        return (heard.utilisation * 1_000_000 > band.high_ppm) - (heard.utilisation * 1_000_000 < band.low_ppm)


@given(histories(), policies)
def test_every_proposal_is_justified(commands, policy):
    """Within the limits, after the cooldown, by a full continuous window; never by a broken one."""
    Judged(policy).follow(commands)


@example(
    commands=[("limits", 3, 0), ("broken", {"utilisation": None}), ("windows", 2, 0.9)],
    policy=SHORT,
)  # the minimum was raised above the present size
@given(histories(), policies)
def test_proposals_of_one_epoch_differ_from_one_to_the_next(commands, policy):
    story = Judged(policy)
    made = []
    for command in commands:
        before = len(story.proposals)
        story.follow([command])
        made += [(story.epoch, proposal.workers) for _, proposal in story.proposals[before:]]
    assert all(one != other for one, other in pairwise(made))


@given(histories(), policies)
def test_a_fixed_job_is_never_resized(commands, policy):
    assert Judged(policy, mode=Mode.FIXED).follow(commands).proposals == []


@given(st.data(), st.integers(1, 3), st.integers(1, 5))
def test_topics_have_no_order_among_each_other(data, generation, workers):
    """The same words of three topics, each topic in its order, interleaved in any way: the same job."""
    topics = [
        [submitted(), changed(2, workers_max=7), changed(3, workers_max=5)],
        [granted(workers=2), resized(epoch=2, workers=workers)],
        [group_started(), group_changed(generation=generation, workers=workers)],
    ]
    places = data.draw(st.permutations([n for n, topic in enumerate(topics) for _ in topic]))
    queues = [list(topic) for topic in topics]
    told = Story().tell(*[queues[n].pop(0) for n in places]).job
    assert told == Story().tell(*[event for topic in topics for event in topic]).job


@given(st.data())
def test_repeats_and_old_words_change_nothing(data):
    words = [
        submitted(),
        granted(),
        group_started(),
        changed(2, workers_max=5),
        resized(epoch=2, workers=4),
        group_changed(generation=2, workers=4),
        granted(epoch=3, attempt=2, workers=3),
        group_ended(attempt=1),
        group_started(attempt=2, generation=3, workers=3),
    ]
    story = Story().tell(*words)
    job = story.wait(100).job
    old = data.draw(st.lists(st.sampled_from(words), max_size=6))
    assert story.tell(*old).job == job


@given(st.lists(st.sampled_from([0.1, 0.8, 0.9]), max_size=8), st.integers(0, 7))
def test_the_event_of_a_group_may_come_after_its_windows(utilisations, place):
    """A generation's windows count from the first, whether its worker event came before or later."""
    assume(place <= len(utilisations))
    early, late = running(policy=SHORT).windows(1), running(policy=SHORT).windows(1)
    early.tell(group_changed(generation=2, workers=2))
    for number, utilisation in enumerate(utilisations):
        if number == place:
            late.tell(group_changed(generation=2, workers=2))
        early.windows(1, utilisation, generation=2)
        late.windows(1, utilisation, generation=2)
    if place == len(utilisations):
        late.tell(group_changed(generation=2, workers=2))
    early.decide()
    late.decide()
    assert late.job.streak == early.job.streak
    if place < len(utilisations):
        early.windows(3, 0.9, generation=2)
        late.windows(3, 0.9, generation=2)
        assert late.sizes[-1:] == early.sizes[-1:]


def test_the_laws_see_proposals():
    """The histories above are no good if nothing is ever proposed in them."""
    grows = [("windows", 4, 0.9), ("resize", 4), ("windows", 4, 0.1), ("windows", 4, 0.8)]
    assert Judged(SHORT).follow(grows).sizes == [4, 1, 4]


@given(histories(), policies)
def test_a_closed_job_is_silent(commands, policy):
    story = Judged(policy).tell(allocation_closed(epoch=99))
    assert story.follow(commands).proposals == []
