"""The soak, in small: jobs of every kind through a real installation, then one trainer resized many times."""

from loadtests.soak import soak

JOBS, RESIZES = 30, 12
KIB = 1024


def test_nothing_stays_of_jobs_and_a_generation_costs_little() -> None:
    done = soak(jobs=JOBS, resizes=RESIZES, at_once=6, say=lambda _: None)
    assert dict(done.jobs.ended) == {
        "succeeds": 15,
        "command": 3,
        "fails": 3,
        "trains": 3,
        "cancelled early": 3,
        "cancelled running": 3,
    }
    assert done.shims_left == 0
    generations = [look.generation for look in done.resizes.looks]
    assert generations == sorted(set(generations))
    assert len(generations) == RESIZES + 1
    # Every resize is a generation of its own, and the worker that was there first has been in all of them.
    growth = done.growth
    assert growth.generations >= RESIZES
    assert growth.descriptors <= 1.3, growth
    assert growth.threads <= 1.3, growth
    assert growth.memory_bytes < 200 * KIB, growth  # the first groups cost more, since their threads get memory anew
    first, last = done.job_samples[0].server, done.job_samples[-1].server
    assert last.memory_bytes - first.memory_bytes < JOBS * 1024 * KIB
    assert last.descriptors - first.descriptors < JOBS
