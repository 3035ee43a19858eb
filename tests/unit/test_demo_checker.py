"""The checker: a good run satisfies every claim, and each damage fails the one claim that speaks of it."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from demo_recordings import FIRST, SERVICES, URGENT, Damage, Recording, good_run, member

from demo import checker
from demo.checker import CLAIMS, check
from demo.record import BrokenRecord, read_record
from demo.verdict import Status

ROOT = Path(__file__).parents[2]


def verdicts(run: Recording, folder: Path) -> dict[str, Status]:
    return {name: verdict.status for name, verdict in check(read_record(run.write(folder))).items()}


def lines_of(run: Recording, job: str, *kinds: str) -> list[dict]:
    return [e for lines in run.ledgers[job].values() for e in lines if not kinds or e["k"] in kinds]


def events_of(run: Recording, kind: str) -> list[dict]:
    return [e for e in run.events if e["type"] == kind]


def test_good_run_satisfies_every_claim(tmp_path):
    found = check(read_record(good_run().write(tmp_path)))
    assert {name: v.detail for name, v in found.items() if v.status is not Status.OK} == {}
    assert list(found) == list(CLAIMS)


# -- one damage per way in which a claim can be broken ----------------------------------------------------------


def too_short_a_window(run: Recording) -> None:
    windows = events_of(run, "tide.metric.window.v1")
    windows[1]["data"]["utilisation"] = 0.80


def a_window_of_the_generation_before(run: Recording) -> None:
    windows = [e for e in events_of(run, "tide.metric.window.v1") if e["data"]["generation"] == 2]
    windows[0]["data"]["generation"] = 1


def a_window_with_a_silent_worker(run: Recording) -> None:
    windows = [e for e in events_of(run, "tide.metric.window.v1") if e["data"]["generation"] == 2]
    windows[-1]["data"]["members_reporting"] = 1


def growth_by_request(run: Recording) -> None:
    for event in events_of(run, "tide.allocation.resized.v1"):
        if event["data"]["reason"]["code"] == "GREW_PROPOSED":
            event["data"]["reason"]["code"] = "GREW_REQUESTED"


def shrunk_workers_restarted(run: Recording) -> None:
    for generation, pid in ((4, 301), (5, 301), (6, 301), (7, 301)):
        for line in lines_of(run, FIRST):
            if line["generation"] == generation and line["pid"] == 101:
                line["pid"] = pid


def shrunk_worker_with_reused_pid(run: Recording) -> None:
    shrink = next(e for e in lines_of(run, FIRST) if e["generation"] == 3)["t"]
    for sample in run.samples:
        for process in sample["alive"]:
            if process[0] == 101 and sample["t"] > shrink + 1:
                process[1] += 1


def nothing_shrank(run: Recording) -> None:
    for event in events_of(run, "tide.allocation.resized.v1"):
        if event["data"]["reason"]["code"] == "SHRANK_FOR_CLAIMANT":
            event["data"]["reason"]["code"] = "SHRANK_REQUESTED"


def urgent_failed(run: Recording) -> None:
    closed = next(e for e in events_of(run, "tide.allocation.closed.v1") if e["subject"] == URGENT)
    closed["data"]["outcome"] = "failed"


def urgent_ran_on_one_worker(run: Recording) -> None:
    for line in lines_of(run, URGENT):
        line["pid"] = 201


def never_given_back(run: Recording) -> None:
    run.events = [e for e in run.events if e["data"].get("reason", {}) != {"code": "GAVE_BACK", "detail": "2 to 4"}]


def given_back_to_strangers(run: Recording) -> None:
    for line in lines_of(run, FIRST):
        if line["generation"] == 5 and line["pid"] == 101:
            line["pid"] = 401


def never_replaced(run: Recording) -> None:
    run.ledgers[FIRST] = {
        folder: [e for e in lines if e["generation"] < 7] for folder, lines in run.ledgers[FIRST].items()
    }


def killed_one_still_runs(run: Recording) -> None:
    for sample in run.samples[:-1]:
        sample["alive"].append([102, 1020, "S"])


def all_replaced(run: Recording) -> None:
    for line in lines_of(run, FIRST):
        if line["generation"] == 7:
            line["pid"] += 500


def workers_stopped_in_the_outage(run: Recording) -> None:
    killed = next(m["t"] for m in run.marks if m["mark"] == "services_killed")
    for line in lines_of(run, FIRST):
        if line["t"] > killed + 1:
            line["t"] += 2.5
    for mark in run.marks:
        if mark["t"] > killed:
            mark["t"] += 2.5


def services_never_left(run: Recording) -> None:
    for sample in run.samples[:-1]:
        sample["api"] = True
        sample["alive"] = [*(p for p in sample["alive"] if p[0] != SERVICES), [SERVICES, SERVICES * 10, "S"]]


def group_formed_anew_after_the_outage(run: Recording) -> None:
    back = next(m["t"] for m in run.marks if m["mark"] == "services_back")
    for line in lines_of(run, FIRST):
        if line["t"] >= back:
            line["generation"] = 8


def step_applied_in_two_generations(run: Recording) -> None:
    copies = [{**e, "generation": 2, "pid": 999} for e in run.ledgers[FIRST][member(0)] if e["step"] < 3]
    run.ledgers[FIRST]["worker-9-1"] = copies


def step_applied_twice_in_one_generation(run: Recording) -> None:
    copies = [{**e, "pid": 999} for e in run.ledgers[FIRST][member(0)] if e["step"] < 3]
    run.ledgers[FIRST]["worker-9-1"] = copies


def step_missing(run: Recording) -> None:
    run.ledgers[FIRST] = {
        folder: [e for e in lines if e["step"] != 31] for folder, lines in run.ledgers[FIRST].items()
    }


def rank_missing(run: Recording) -> None:
    run.ledgers[FIRST][member(2)] = [e for e in run.ledgers[FIRST][member(2)] if e["step"] != 25]


def sample_used_twice(run: Recording) -> None:
    begun = next(e for e in lines_of(run, FIRST, "begun") if e["step"] == 1)
    begun["ids"] = [*begun["ids"][1:], 0]


def sample_left_out(run: Recording) -> None:
    begun = next(e for e in lines_of(run, URGENT, "begun") if e["step"] == 1)
    begun["ids"] = begun["ids"][1:]


def granted_before_the_room_was_free(run: Recording) -> None:
    freed = next(e for e in run.events if e["type"] == "tide.worker.room_freed.v1")
    run.events.remove(freed)


def epoch_fell(run: Recording) -> None:
    events_of(run, "tide.allocation.resized.v1")[1]["data"]["epoch"] = 2


def generation_used_again(run: Recording) -> None:
    events_of(run, "tide.worker.group_changed.v1")[-1]["data"]["generation"] = 6


def closed_twice(run: Recording) -> None:
    closed = events_of(run, "tide.allocation.closed.v1")[-1]
    run.events.append({**closed, "sequence": "900-900"})


def never_closed(run: Recording) -> None:
    run.events = [e for e in run.events if (e["type"], e["subject"]) != ("tide.job.ended.v1", FIRST)]


def learnt_little(run: Recording) -> None:
    run.logs[FIRST][member(0)] = "held-out accuracy 0.941\n"


def said_nothing(run: Recording) -> None:
    run.logs.clear()


def left_running(run: Recording) -> None:
    run.samples[-1]["alive"] = [[107, 1070, "S"]]


def no_last_look(run: Recording) -> None:
    run.samples.pop()


DAMAGES: list[tuple[Damage, str]] = [
    (too_short_a_window, "grew"),
    (a_window_of_the_generation_before, "grew"),
    (a_window_with_a_silent_worker, "grew"),
    (growth_by_request, "grew"),
    (shrunk_workers_restarted, "shrank-in-place"),
    (shrunk_worker_with_reused_pid, "shrank-in-place"),
    (nothing_shrank, "shrank-in-place"),
    (urgent_failed, "urgent-ran"),
    (urgent_ran_on_one_worker, "urgent-ran"),
    (never_given_back, "took-back"),
    (given_back_to_strangers, "took-back"),
    (never_replaced, "replaced"),
    (killed_one_still_runs, "replaced"),
    (all_replaced, "replaced"),
    (workers_stopped_in_the_outage, "outlived-outage"),
    (services_never_left, "outlived-outage"),
    (group_formed_anew_after_the_outage, "outlived-outage"),
    (step_applied_in_two_generations, "once"),
    (step_applied_twice_in_one_generation, "once"),
    (step_missing, "once"),
    (rank_missing, "once"),
    (sample_used_twice, "once"),
    (sample_left_out, "once"),
    (granted_before_the_room_was_free, "within-slots"),
    (epoch_fell, "epochs-rise"),
    (generation_used_again, "epochs-rise"),
    (closed_twice, "closed-once"),
    (never_closed, "closed-once"),
    (learnt_little, "accurate"),
    (said_nothing, "accurate"),
    (left_running, "nothing-left"),
    (no_last_look, "nothing-left"),
]


@pytest.mark.parametrize(("damage", "claim"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_damage_fails_its_claim(damage, claim, tmp_path):
    run = good_run()
    damage(run)
    assert verdicts(run, tmp_path)[claim] is Status.FAILED


def test_every_claim_has_been_seen_to_fail():
    assert {claim for _, claim in DAMAGES} == set(CLAIMS)


def test_unrelated_claims_survive_a_damage(tmp_path):
    run = good_run()
    workers_stopped_in_the_outage(run)
    others = {name: status for name, status in verdicts(run, tmp_path).items() if name != "outlived-outage"}
    assert set(others.values()) == {Status.OK}


# -- a story that was cut short --------------------------------------------------------------------------------


def test_what_was_not_reached_has_not_failed(tmp_path):
    run = good_run()
    kill = next(m for m in run.marks if m["mark"] == "worker_killed")
    run.marks = [m for m in run.marks if m["t"] < kill["t"]]
    run.marks.append({"mark": "cut", "t": kill["t"], "why": "decided"})
    run.events = [
        e for e in run.events if not (e["subject"] == FIRST and "ed.v1" in e["type"] and "end" in e["type"])
    ]
    run.events = [e for e in run.events if e["type"] != "tide.allocation.closed.v1" or e["subject"] != FIRST]
    run.logs.clear()
    found = verdicts(run, tmp_path)
    assert {name for name, status in found.items() if status is Status.NOT_REACHED} == {
        "replaced",
        "outlived-outage",
        "closed-once",
        "accurate",
    }
    assert Status.FAILED not in found.values()


def test_replacement_after_the_cut_does_not_count(tmp_path):
    run = good_run()
    four_again = min(e["t"] for e in lines_of(run, FIRST) if e["generation"] == 7)
    run.marks.append({"mark": "cut", "t": four_again - 0.01, "why": "decided"})
    assert verdicts(run, tmp_path)["replaced"] is Status.FAILED


def test_cut_short_is_no_success(tmp_path, capsys):
    run = good_run()
    run.marks = [m for m in run.marks if m["mark"] != "services_killed"]
    run.write(tmp_path)
    assert checker.main([str(tmp_path)]) == 1
    assert "not reached outlived-outage" in capsys.readouterr().out


# -- the record and the program --------------------------------------------------------------------------------


def test_half_written_last_line_is_no_record(tmp_path):
    good_run().write(tmp_path)
    ledger = tmp_path / "run" / FIRST / member(1) / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes() + b'{"k":"begun","step":44')
    assert {v.status for v in check(read_record(tmp_path)).values()} == {Status.OK}


def test_damaged_line_is_named(tmp_path):
    good_run().write(tmp_path)
    (tmp_path / "events.jsonl").write_text("{broken\n")
    with pytest.raises(BrokenRecord, match=r"events\.jsonl line 1"):
        read_record(tmp_path)


def test_program_says_that_a_record_is_missing(tmp_path, capsys):
    assert checker.main([str(tmp_path)]) == 2
    assert "processes.jsonl" in capsys.readouterr().err


def test_program_prints_each_claim_with_its_numbers(tmp_path, capsys):
    good_run().write(tmp_path)
    assert checker.main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["ok", name] for name in CLAIMS]
    assert "accuracy 0.968" in lines[-2]


def test_it_imports_nothing_of_the_product_but_the_reader_of_ledgers():
    modules = "import json, sys, demo.checker; print(json.dumps(sorted(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", modules], cwd=ROOT, capture_output=True, check=True, text=True)
    names = json.loads(answer.stdout)
    loaded = {name.partition(".")[0] for name in names}
    assert not loaded & {
        "services",
        "shared",
        "schemas",
        "httpx",
        "pydantic",
        "rich",
        "matplotlib",
        "paddle",
        "numpy",
    }
    product = [name for name in names if name.startswith("tidewright")]
    assert product == ["tidewright", "tidewright.elastic", "tidewright.elastic.proof"]
    for name in [*(name for name in names if name.startswith("demo.")), "tidewright.elastic.proof"]:
        source = ROOT / (name.replace(".", "/") + ".py")
        imported = {
            alias.name
            for node in ast.walk(ast.parse(source.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in (node.names if isinstance(node, ast.Import) else [ast.alias(node.module or "")])
        }
        roots = {one.partition(".")[0] for one in imported - {"tidewright.elastic.proof"}}
        assert roots <= set(sys.stdlib_module_names) | {"demo"}, name
