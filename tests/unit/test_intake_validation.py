"""What becomes of a submission: defaults, warnings, exact sizes, and whether it can ever start."""

import pytest

from schemas.api.jobs import PatchJob, SubmitJob
from schemas.vocabulary import (
    JobPhase,
    Mode,
    NodeName,
)
from services.intake.core.changes import Changed, plan_patch
from services.intake.core.fit import accelerator_name, never_fits
from services.intake.core.validation import Accepted, Refused
from tests.unit.intake_builders import (
    make_capacity,
    make_judgement,
    make_record,
    make_request,
)


@pytest.mark.parametrize(
    ("fields", "mode"),
    [
        ({"script": "/t.py"}, Mode.LIVE),
        ({"command": ["python"]}, Mode.FIXED),
        ({"command": ["python"], "checkpoint_path": "c"}, Mode.RESTART),
        ({"command": ["python"], "mode": "live"}, Mode.LIVE),
        ({"script": "/t.py", "mode": "fixed"}, Mode.FIXED),
    ],
)
def test_the_mode_of_a_job_that_names_none(fields, mode):
    judgement = make_judgement(**fields)
    assert isinstance(judgement, Accepted)
    assert judgement.submitted.spec.mode is mode


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        ({}, (1, 1, 1)),
        ({"workers_max": 4}, (1, 1, 4)),
        ({"workers_min": 3}, (3, 3, 3)),
        ({"workers": 3}, (1, 3, 3)),
        ({"workers_min": 2, "workers": 3, "workers_max": 8}, (2, 3, 8)),
        ({"mode": "fixed", "workers": 3}, (3, 3, 3)),
        ({"mode": "fixed", "workers_max": 3}, (3, 3, 3)),
        ({"mode": "fixed", "workers_min": 3, "workers_max": 3}, (3, 3, 3)),
    ],
)
def test_sizes_that_are_not_named(fields, sizes):
    judgement = make_judgement(script="/t.py", **fields)
    assert isinstance(judgement, Accepted)
    request = judgement.submitted.request
    assert (request.workers_min, request.workers, request.workers_max) == sizes


def test_resources_are_exact():
    fields = {"accelerators": 2, "cpu": "0.1", "memory": "1.5Gi"}
    judgement = make_judgement(script="/t.py", resources=fields)
    assert judgement.submitted.roles[0].resources.as_dict() == {
        "cpu": 100,
        "memory": 3 * 2**29,
        "tidewright.io/slot": 2000,
    }
    assert make_judgement(script="/t.py", resources={"accelerators": 0}).submitted.roles[0].resources.as_dict() == {}


def test_what_has_no_meaning_here_is_named():
    fields = {"image": "x", "volumes": [1], "secrets": [2], "resources": {"shm": "1Gi"}}
    judgement = make_judgement(script="/t.py", **fields)
    assert [warning.partition(":")[0] for warning in judgement.warnings] == [
        "image",
        "volumes",
        "secrets",
        "resources.shm",
    ]
    assert "shm" not in judgement.submitted.roles[0].resources.as_dict()
    assert make_judgement(script="/t.py", is_local=False, **fields).warnings == ()


def test_other_warnings():
    command = make_judgement(command=["x"], mode="restart", workers_max=4, finish_by="2029-01-01T00:00:00Z")
    assert [warning.partition(":")[0] for warning in command.warnings] == ["workers", "finish_by"]
    assert [w.partition(":")[0] for w in make_judgement(script="t.py").warnings] == ["script"]


def test_names_of_jobs_that_have_none():
    assert make_record(script="/jobs/My Train_2.py").spec.name == "my-train_2"
    assert make_record(script="/jobs/Ж.py").spec.name == "job"
    assert SubmitJob.model_validate_json(f'{{"name": "{make_record(script="/a/-x-.py").spec.name}"}}').name == "x"


def test_environment_values_are_not_in_the_event():
    judgement = make_judgement(script="/t.py", environment={"B": "2", "A": "sesame"})
    assert judgement.submitted.spec.environment_names == ("A", "B")
    assert judgement.environment == {"A": "sesame", "B": "2"}
    assert "sesame" not in repr(judgement.submitted)


def test_refusals_name_every_field():
    judgement = make_judgement(workers_min=3, workers_max=2, environment={"1": "x"})
    assert isinstance(judgement, Refused)
    assert [error.field for error in judgement.errors] == ["/script", "/environment/1", "/workers_min"]


# -- fit --------------------------------------------------------------------------------------------------------


def test_accelerators_count_in_what_the_nodes_report():
    assert accelerator_name(None, default="tidewright.io/slot") == "tidewright.io/slot"
    assert accelerator_name(make_capacity(4), default="nvidia.com/gpu") == "tidewright.io/slot"
    gpus = make_capacity(4, resource="nvidia.com/gpu")
    assert accelerator_name(gpus, default="tidewright.io/slot") == "nvidia.com/gpu"
    assert accelerator_name(make_capacity(), default="nvidia.com/gpu") == "nvidia.com/gpu"


def test_never_fits_only_when_it_is_certain():
    record = make_record(workers_min=2, resources={"accelerators": 3})
    assert never_fits(record.roles, record.request, None) is None
    assert never_fits(record.roles, record.request, make_capacity(3, 3)) is None
    assert never_fits(record.roles, record.request, make_capacity(3, lost=[NodeName("gone")])) is None
    verdict = never_fits(record.roles, record.request, make_capacity(3, 2))
    assert verdict.field == "/workers_min"
    assert "at most 1 of these workers" in verdict.detail
    assert "node-0 with 3 slots, 4 cpu, 1Gi memory" in verdict.detail
    none_at_all = never_fits(record.roles, record.request, make_capacity(2, 2))
    assert none_at_all.field == "/resources"
    cpu = make_record(resources={"accelerators": 0, "cpu": 5})
    assert "5 cpu" in never_fits(cpu.roles, cpu.request, make_capacity(8)).detail


@pytest.mark.parametrize(
    ("patch", "sizes"),
    [
        ({"workers_max": 2}, (1, 2, 2)),
        ({"workers_min": 5}, (5, 5, 8)),
        ({"workers_min": 2, "workers_max": 2}, (2, 2, 2)),
        ({"workers_max": 2, "workers": 1}, (1, 1, 2)),
        ({"workers": 8}, (1, 8, 8)),
    ],
)
def test_limits_pull_the_size_wished_for_along(patch, sizes):
    request = make_request(workers_min=1, workers=4, workers_max=8)
    change = plan_patch(request, PatchJob(**patch), phase=JobPhase.RUNNING, mode=Mode.LIVE)
    assert isinstance(change, Changed)
    assert (change.request.workers_min, change.request.workers, change.request.workers_max) == sizes
