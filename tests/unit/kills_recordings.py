"""Builds the record of a kill test that never took place: a good one, which a test then damages."""

from demo_recordings import Recording, granted, member

ANCHOR, SHORT, CANCELLED = "j01anchor", "j02short", "j03cancelled"
SUPERVISOR, SERVICES, SERVICES_AGAIN, ZYGOTE, POSTGRES = 40, 50, 51, 60, 70
GRANDCHILD = 301
KILLS = ("services", "postgres", "worker", "everything")


def good_storm() -> Recording:
    """Four kills: the anchor trains over all of them, and loses its whole group in the last one."""
    run = Recording()
    slots = {"name": "here", "allocatable": {"tidewright.io/slot": 4000}, "members": []}
    run.event("tide.capacity.observed.v1", "cluster", revision=1, nodes=[slots])
    _submit(run, ANCHOR, "anchor-1")
    granted(run, ANCHOR, 2)
    run.event("tide.worker.group_started.v1", ANCHOR, epoch=1, attempt=1, generation=1, workers=2)
    two = {101: member(0), 102: member(1)}
    run.train(ANCHOR, generation=1, members=two, steps=10)
    for number, victim in enumerate(("services", "postgres"), start=1):
        run.mark("killed", number=number, victim=victim, processes=[[SERVICES, 500]])
        run.train(ANCHOR, generation=1, members=two, steps=10)
        _back(run, number)
        run.train(ANCHOR, generation=1, members=two, steps=5)
    _short_jobs(run)
    run.mark("killed", number=3, victim="worker", processes=[[102, 1020]])
    run.changed(ANCHOR, generation=2, workers=1, cause="member_lost")
    run.train(ANCHOR, generation=2, members={101: member(0)}, steps=5)
    run.changed(ANCHOR, generation=3, workers=2, cause="member_replaced")
    run.train(ANCHOR, generation=3, members={101: member(0), 103: member(1, 2)}, steps=5)
    _back(run, 3)
    _begin_anew(run)
    _end(run, ANCHOR, "succeeded")
    run.mark("quiet", parts=[[pid, pid * 10] for pid in (SUPERVISOR, SERVICES_AGAIN, ZYGOTE, POSTGRES)])
    run.clock += 2.0
    _live(run)
    run.mark("down")
    return run


def _submit(run: Recording, job: str, name: str) -> None:
    run.mark("submitting", part=name.partition("-")[0], called=name)
    run.event("tide.job.submitted.v1", job, spec={"name": name})
    run.mark("submitted", part=name.partition("-")[0], called=name, job=job)


def _back(run: Recording, number: int) -> None:
    run.mark("back", number=number, seconds=1.0)
    run.mark("whole", number=number, seconds=2.0)


def _short_jobs(run: Recording) -> None:
    """One that ends by itself, and one that its user cancels."""
    for job, name, pid, outcome in ((SHORT, "short-2", 201, "succeeded"), (CANCELLED, "short-3", 202, "cancelled")):
        _submit(run, job, name)
        granted(run, job, 1)
        run.event("tide.worker.group_started.v1", job, epoch=1, attempt=1, generation=1, workers=1)
        run.train(job, generation=1, members={pid: member(0)}, steps=5 if outcome == "succeeded" else 3)
        if outcome == "cancelled":
            run.mark("cancelling", job=job)
            run.event("tide.allocation.evicted.v1", job, epoch=2, attempt=1, reason={"code": "CANCELLED"})
        _end(run, job, outcome)


def _begin_anew(run: Recording) -> None:
    """The whole group is lost 5 steps after its checkpoint; the same attempt goes on from there."""
    run.mark("killed", number=4, victim="everything", processes=[[ZYGOTE, 600]])
    before = run.steps[ANCHOR]
    run.train(ANCHOR, generation=3, members={101: member(0), 103: member(1, 2)}, steps=5)
    run.steps[ANCHOR] = before
    run.changed(ANCHOR, generation=4, workers=2, cause="restarted")
    run.train(ANCHOR, generation=4, members={104: member(0, 2), 105: member(1, 3)}, steps=10)
    for lines in run.ledgers[ANCHOR].values():
        for line in lines:
            if line["k"] == "adopted" and line["generation"] == 4:
                line["source"] = "checkpoint"
    _back(run, 4)


def _end(run: Recording, job: str, outcome: str) -> None:
    run.event("tide.worker.group_ended.v1", job, attempt=1, outcome=outcome, step=run.steps[job])
    reason = {"code": "COMPLETED", "detail": "done"}
    run.event("tide.allocation.closed.v1", job, epoch=9, attempt=1, outcome=outcome, reason=reason)
    run.event("tide.job.ended.v1", job, outcome=outcome, exit_code=0)


def _live(run: Recording) -> None:
    """Samples that agree with marks and ledgers; a grandchild lives for as long as its worker."""
    killed = {m["number"]: m["t"] for m in run.marks if m["mark"] == "killed"}
    until = run.clock
    lives = [(pid, 0.0, until) for pid in (SUPERVISOR, ZYGOTE, POSTGRES)]
    lives += [(SERVICES, 0.0, killed[1]), (SERVICES_AGAIN, killed[1] + 1.0, until)]
    lines = [line for ledger in run.ledgers.values() for lines in ledger.values() for line in lines]
    for pid in sorted({line["pid"] for line in lines}):
        own = [line["t"] for line in lines if line["pid"] == pid]
        lives.append((pid, min(own), max(own) + 0.1))
    lives.append((GRANDCHILD, 1_000.0, killed[4]))
    run.sample_all(lives, away=(killed[1], killed[1] + 1.0))
