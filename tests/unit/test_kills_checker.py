"""The judge of the kill test: a good record is nothing wrong, and each planted fault moves its own figure alone."""

import ast
import copy
from pathlib import Path

import pytest
from demo_recordings import Recording
from kills_recordings import ANCHOR, CANCELLED, GRANDCHILD, SERVICES_AGAIN, SHORT, good_storm

from demo.record import read_record
from demo.verdict import Status
from loadtests import kills_checker
from loadtests.kills_checker import Findings, find, told

GOOD = {"kills": 4, "lost": 0, "run_twice": 0, "left_over": 0}


def findings(run: Recording, folder: Path) -> Findings:
    return find(read_record(run.write(folder)))


def wrong(found: Findings) -> set[str]:
    """Names of the figures and laws that say that something is wrong."""
    figures = {name for name in ("lost", "run_twice", "left_over") if found.results[name]}
    if found.longest_step_gap_seconds > kills_checker.GAP_SECONDS_MAX:
        figures.add("longest_step_gap_seconds")
    return figures | {name for name, verdict in found.laws.items() if verdict.status is not Status.OK}


def entries(run: Recording, job: str, kind: str) -> list[dict]:
    return [line for lines in run.ledgers[job].values() for line in lines if line["k"] == kind]


def events(run: Recording, job: str, kind: str) -> list[dict]:
    return [e for e in run.events if (e["subject"], e["type"]) == (job, kind)]


def test_nothing_is_wrong_with_a_good_record(tmp_path):
    found = findings(good_storm(), tmp_path)
    assert wrong(found) == set(), told(found)
    assert found.is_good
    assert found.results == {**GOOD, "longest_step_gap_seconds": 0.2}
    assert (found.jobs, found.repeated) == (3, 5)
    assert [o.victim for o in found.outages] == ["services", "postgres", "worker", "everything"]


# -- one damage per way in which a figure or a law can be moved ---------------------------------------------------


def a_job_that_never_reached_the_log(run: Recording) -> None:
    run.events = [e for e in run.events if e["subject"] != SHORT]


def a_job_that_never_ended(run: Recording) -> None:
    run.events = [e for e in run.events if (e["subject"], e["type"]) != (SHORT, "tide.allocation.closed.v1")]


def a_job_that_failed(run: Recording) -> None:
    for kind in ("tide.allocation.closed.v1", "tide.job.ended.v1"):
        events(run, SHORT, kind)[0]["data"]["outcome"] = "failed"


def a_job_that_was_cancelled_by_nobody(run: Recording) -> None:
    run.marks = [m for m in run.marks if (m["mark"], m.get("job")) != ("cancelling", CANCELLED)]


def a_step_that_was_left_out(run: Recording) -> None:
    for folder, lines in run.ledgers[ANCHOR].items():
        run.ledgers[ANCHOR][folder] = [e for e in lines if e["k"] == "adopted" or e["step"] != 7]


def a_copied_ledger(run: Recording) -> None:
    """A second process did all the same, under the name of another member."""
    copied = copy.deepcopy(run.ledgers[SHORT]["worker-0-1"])
    run.ledgers[SHORT]["worker-0-2"] = [{**line, "pid": 999} for line in copied]


def a_doubled_step(run: Recording) -> None:
    line = next(e for e in entries(run, ANCHOR, "applied") if e["step"] == 12)
    run.ledgers[ANCHOR]["worker-0-1"].append(line)


def a_doubled_sample(run: Recording) -> None:
    first, second, *_ = entries(run, CANCELLED, "begun")
    second["ids"] = [*second["ids"], first["ids"][0]]


def a_lost_group_that_lived_on(run: Recording) -> None:
    """It steps beside the group that began anew from its checkpoint."""
    anew = min(e["t"] for e in entries(run, ANCHOR, "applied") if e["generation"] == 4)
    for line in run.ledgers[ANCHOR]["worker-1-2"]:
        if line["t"] > anew - 1.2:
            line["t"] += 1.3


def a_state_that_began_anew_while_it_was_held(run: Recording) -> None:
    """One of the two that go on from the checkpoint had the newer state all the time."""
    for line in run.ledgers[ANCHOR].pop("worker-0-2"):
        run.ledgers[ANCHOR]["worker-0-1"].append({**line, "pid": 101})


def one_submission_that_became_two_jobs(run: Recording) -> None:
    line = copy.deepcopy(events(run, SHORT, "tide.job.submitted.v1")[0])
    number = len(run.events) + 1
    run.events.append({**line, "subject": "j09twin", "sequence": f"{100 + number}-{number}"})


def a_job_that_ended_twice(run: Recording) -> None:
    line = copy.deepcopy(events(run, SHORT, "tide.job.ended.v1")[0])
    number = len(run.events) + 1
    run.events.append({**line, "sequence": f"{100 + number}-{number}"})


def an_escaped_grandchild(run: Recording) -> None:
    for sample in run.samples:
        if not any(pid == GRANDCHILD for pid, _, _ in sample["alive"]) and not sample.get("final"):
            sample["alive"].append([GRANDCHILD, GRANDCHILD * 10, "S"])


def a_part_that_outlives_the_end(run: Recording) -> None:
    run.samples[-1]["alive"].append([SERVICES_AGAIN, SERVICES_AGAIN * 10, "S"])


def trainers_that_stood_while_postgres_was_away(run: Recording) -> None:
    """All that comes after is 2.5 s late, except the samples, which then show nobody missing."""
    killed = next(m["t"] for m in run.marks if m.get("victim") == "postgres")
    for ledger in run.ledgers.values():
        for line in (line for lines in ledger.values() for line in lines if line["t"] > killed + 1):
            line["t"] += 2.5
    for mark in run.marks:
        if mark["t"] > killed:
            mark["t"] += 2.5
    for sample in run.samples:
        if sample["t"] > killed + 1:
            sample["t"] += 2.5


def trainers_that_stopped_for_ever_in_an_outage(run: Recording) -> None:
    """Nothing tells why they stopped: their job was neither evicted, nor had it ended."""
    killed = next(m["t"] for m in run.marks if m.get("victim") == "services")
    keep = {e["step"] for e in entries(run, ANCHOR, "applied") if e["t"] < killed + 1}
    for folder, lines in run.ledgers[ANCHOR].items():
        run.ledgers[ANCHOR][folder] = [e for e in lines if e["step"] in keep]
    run.events = [e for e in run.events if e["subject"] != ANCHOR or "worker" not in e["type"]]


def a_worker_that_was_replaced_in_an_outage(run: Recording) -> None:
    killed = next(m["t"] for m in run.marks if m.get("victim") == "services")
    for sample in run.samples:
        if sample["t"] > killed + 1:
            sample["alive"] = [[601 if pid == 102 else pid, start, state] for pid, start, state in sample["alive"]]


def it_never_came_back(run: Recording) -> None:
    run.marks = [m for m in run.marks if (m["mark"], m.get("number")) != ("whole", 4)]


def more_than_there_is(run: Recording) -> None:
    events(run, "cluster", "tide.capacity.observed.v1")[0]["data"]["nodes"][0]["allocatable"] = {
        "tidewright.io/slot": 2000
    }


def an_epoch_that_fell(run: Recording) -> None:
    events(run, CANCELLED, "tide.allocation.evicted.v1")[0]["data"]["epoch"] = 1


@pytest.mark.parametrize(
    ("damage", "moved"),
    [
        (a_job_that_never_reached_the_log, "lost"),
        (a_job_that_never_ended, "lost"),
        (a_job_that_failed, "lost"),
        (a_job_that_was_cancelled_by_nobody, "lost"),
        (a_step_that_was_left_out, "lost"),
        (a_copied_ledger, "run_twice"),
        (a_doubled_step, "run_twice"),
        (a_doubled_sample, "run_twice"),
        (a_lost_group_that_lived_on, "run_twice"),
        (a_state_that_began_anew_while_it_was_held, "run_twice"),
        (one_submission_that_became_two_jobs, "run_twice"),
        (a_job_that_ended_twice, "run_twice"),
        (an_escaped_grandchild, "left_over"),
        (a_part_that_outlives_the_end, "left_over"),
        (trainers_that_stood_while_postgres_was_away, "longest_step_gap_seconds"),
        (trainers_that_stopped_for_ever_in_an_outage, "longest_step_gap_seconds"),
        (a_worker_that_was_replaced_in_an_outage, "pids-stay"),
        (it_never_came_back, "came-back"),
        (more_than_there_is, "within-slots"),
        (an_epoch_that_fell, "epochs-rise"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_planted_fault_moves_its_own_figure_and_no_other(damage, moved, tmp_path):
    run = good_storm()
    damage(run)
    found = findings(run, tmp_path)
    assert wrong(found) == {moved}, told(found)
    assert not found.is_good


def test_a_worker_that_was_asked_to_leave_in_an_outage_is_no_fault(tmp_path):
    run = good_storm()
    a_worker_that_was_replaced_in_an_outage(run)
    killed = next(m["t"] for m in run.marks if m.get("victim") == "services")
    where = {"step": 15, "generation": 1, "rank": 1, "world": 2, "pid": 102}
    run.ledgers[ANCHOR]["worker-1-1"].append({"k": "left", **where, "t": killed + 0.5})
    assert "pids-stay" not in wrong(findings(run, tmp_path))


def test_the_judge_knows_nothing_of_the_product_but_the_reader_of_ledgers():
    tree = ast.parse(Path(kills_checker.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    ours = {name for name in imported if str(name).split(".")[0] in ("services", "shared", "schemas", "tidewright")}
    assert ours == {"tidewright.elastic.proof"}


def test_exit_status_says_whether_something_is_wrong(tmp_path, capsys):
    folder = str(good_storm().write(tmp_path / "good"))
    assert kills_checker.main([folder]) == 0
    run = good_storm()
    a_doubled_step(run)
    assert kills_checker.main([str(run.write(tmp_path / "bad"))]) == 1
    assert "step 12 was applied 2 times" in capsys.readouterr().out
    assert kills_checker.main([str(tmp_path / "none")]) == 2
