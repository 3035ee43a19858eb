"""Submitting, reading, changing and cancelling jobs over HTTP, on a real database."""

import asyncio

import pytest

from schemas.events.job import JobChanged, JobSubmitted
from schemas.vocabulary import Outcome, ServiceName
from services.intake.store import save_request
from shared.errors import Conflict
from shared.testing.harness import read_data, read_rows
from tests.integration.intake_bed import capacity, closed, granted, intake_bed, started
from tests.unit.intake_builders import make_request


async def test_a_job_is_written_published_and_shown(database):
    async with intake_bed(database) as bed:
        answer = await bed.http.post(
            "/v1/jobs",
            json={
                "script": "/jobs/train.py",
                "workers_max": 4,
                "environment": {"TOKEN": "sesame"},
                "labels": {"a": "b"},
            },
        )
        assert answer.status_code == 201
        job = answer.json()
        assert answer.headers["etag"] == '"1"'
        assert answer.headers["location"] == f"/v1/jobs/{job['id']}"
        assert (await bed.http.get(f"/v1/jobs/{job['id']}")).json() == job
        assert job["phase"] == "Queued"
        assert job["waiting"]["code"] == "NOT_YET_CONSIDERED"
        assert job["workers"] == {"min": 1, "max": 4, "wished": 1, "granted": 0, "running": 0}
    [submitted] = await read_data(database, JobSubmitted, job["id"])
    assert submitted.request.workers_max == 4
    assert submitted.spec.environment_names == ("TOKEN",)
    [row] = await read_rows(database, "select variables from intake.environments where job_id = :id", id=job["id"])
    assert row["variables"] == {"TOKEN": "sesame"}
    [log] = await read_rows(database, "select count(*) n from log.outbox where payload like '%sesame%'::bytea")
    assert log["n"] == 0


async def test_yaml_means_the_same_as_json(database):
    async with intake_bed(database) as bed:
        text = "script: /jobs/train.py\nlabels: {on: yes, off: no}\npriority: high\nresources: {cpu: 1.5}\n"
        answer = await bed.http.post("/v1/jobs", content=text, headers={"Content-Type": "application/yaml"})
        assert answer.status_code == 201, answer.text
        assert answer.json()["labels"] == {"on": "yes", "off": "no"}
        assert answer.json()["priority"] == "high"


async def test_patch_is_seen_at_once_and_published_whole(database):
    async with intake_bed(database) as bed:
        job = await bed.submit(workers_max=4)
        answer = await bed.http.patch(
            f"/v1/jobs/{job['id']}", json={"priority": "critical", "workers": 3, "reason": "x"}
        )
        assert answer.status_code == 200, answer.text
        assert answer.headers["etag"] == '"2"'
        seen = (await bed.http.get(f"/v1/jobs/{job['id']}")).json()
        assert (seen["version"], seen["priority"], seen["workers"]["wished"]) == (2, "critical", 3)
        same = await bed.http.patch(f"/v1/jobs/{job['id']}", json={"workers": 3})
        assert same.json()["version"] == 2
    [changed] = await read_data(database, JobChanged, job["id"])
    assert (changed.request.version, changed.request.workers, changed.reason) == (2, 3, "x")


async def test_patch_with_an_old_version_is_refused(database):
    async with intake_bed(database) as bed:
        job = await bed.submit()
        path = f"/v1/jobs/{job['id']}"
        assert (await bed.http.patch(path, json={"held": True}, headers={"If-Match": '"1"'})).status_code == 200
        refused = await bed.http.patch(path, json={"held": False}, headers={"If-Match": '"1"'})
        assert refused.status_code == 412
        assert (await bed.http.patch(path, json={"held": False}, headers={"If-Match": '"1", "2"'})).status_code == 200


async def test_patches_at_once_are_all_counted(database):
    """Ten requests raise the version ten times or say that they lost; none overwrites another unseen."""
    async with intake_bed(database) as bed:
        job = await bed.submit(workers_max=20)
        path = f"/v1/jobs/{job['id']}"
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(bed.http.patch(path, json={"workers": n})) for n in range(2, 12)]
        done = [task.result() for task in tasks if task.result().status_code == 200]
        assert {task.result().status_code for task in tasks} <= {200, 409}
        final = (await bed.http.get(path)).json()
        assert final["version"] == 1 + len(done)
    versions = [event.request.version for event in await read_data(database, JobChanged, job["id"])]
    assert versions == list(range(2, 2 + len(done)))


async def test_a_register_is_replaced_by_its_next_version_only(database):
    async with intake_bed(database) as bed:
        job = await bed.submit()
        request = make_request(version=3)
        with pytest.raises(Conflict):
            async with bed.run.context.transaction() as tx:
                await save_request(tx, job["id"], request)
        assert (await bed.http.get(f"/v1/jobs/{job['id']}")).json()["version"] == 1


async def test_cancel_is_idempotent_and_too_late_for_what_ended_otherwise(database):
    async with intake_bed(database) as bed:
        job = await bed.submit()
        path = f"/v1/jobs/{job['id']}"
        first = await bed.http.post(f"{path}/cancel", json={"reason": "no need"})
        again = await bed.http.post(f"{path}/cancel")
        assert (first.status_code, again.status_code) == (202, 202)
        assert first.json()["flags"] == ["cancelling"]
        assert again.json()["version"] == first.json()["version"] == 2
        assert (await bed.http.patch(path, json={"held": True})).status_code == 409
        await bed.say(ServiceName.QUEUEING, job["id"], closed(outcome=Outcome.CANCELLED))
        assert (await bed.http.post(f"{path}/cancel")).status_code == 202
        assert (await bed.http.get(path)).json()["phase"] == "Cancelled"

        other = await bed.submit()
        await bed.say(ServiceName.QUEUEING, other["id"], granted(), closed())
        late = await bed.http.post(f"/v1/jobs/{other['id']}/cancel")
        assert late.status_code == 409
        assert "Succeeded" in late.json()["detail"]
        assert (await bed.http.patch(f"/v1/jobs/{other['id']}", json={"held": True})).status_code == 409


async def test_lists_by_pages_and_filters(database):
    async with intake_bed(database) as bed:
        ids = [
            (await bed.submit(labels={"n": str(n)}, held=n % 2 == 0, queue="q" if n < 3 else "default"))["id"]
            for n in range(7)
        ]
        await bed.say(ServiceName.QUEUEING, ids[5], granted())
        await bed.say(ServiceName.EXECUTION, ids[5], started())

        seen, cursor = [], None
        while True:
            page = (
                await bed.http.get("/v1/jobs", params={"limit": 3, **({"cursor": cursor} if cursor else {})})
            ).json()
            seen += [item["id"] for item in page["items"]]
            cursor = page["next_cursor"]
            if cursor is None:
                break
        assert seen == sorted(ids, reverse=True)

        async def found(**parameters):
            answer = await bed.http.get("/v1/jobs", params=parameters)
            assert answer.status_code == 200, answer.text
            return [item["id"] for item in answer.json()["items"]]

        assert await found(phase="Running") == [ids[5]]
        assert await found(phase="Held") == [ids[6], ids[4], ids[2], ids[0]]
        assert await found(phase="Queued") == [ids[3], ids[1]]
        assert await found(phase=["Running", "Held"]) == [ids[6], ids[5], ids[4], ids[2], ids[0]]
        assert await found(queue="q") == [ids[2], ids[1], ids[0]]
        assert await found(label="n=4") == [ids[4]]
        assert await found(label="n", priority="medium") == sorted(ids, reverse=True)
        assert await found(label=["n=4", "m"]) == []


async def test_a_thousand_submissions_at_once_share_transactions(database):
    async with intake_bed(database) as bed, bed.in_process() as http:

        async def submit(n: int) -> str:
            answer = await http.post("/v1/jobs", json={"script": "/jobs/train.py", "name": f"job-{n}"})
            assert answer.status_code == 201, answer.text
            return answer.json()["id"]

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(submit(n)) for n in range(1000)]
        assert len({task.result() for task in tasks}) == 1000
    [row] = await read_rows(database, "select count(*) jobs, count(distinct xmin::text) commits from intake.jobs")
    assert row["jobs"] == 1000
    assert row["commits"] < 200
    assert len(await read_data(database, JobSubmitted)) == 1000


async def test_what_never_fits_is_refused_unless_wanted(database):
    async with intake_bed(database) as bed:
        await bed.say(ServiceName.EXECUTION, "cluster", capacity(2, 4))
        too_large = await bed.http.post("/v1/jobs", json={"script": "/t.py", "resources": {"accelerators": 5}})
        assert too_large.status_code == 422
        [error] = too_large.json()["errors"]
        assert error["field"] == "/resources"
        assert "node-1 with 4 slots" in error["detail"]
        assert "allow_unsatisfiable" in error["way_out"]
        too_many = await bed.http.post("/v1/jobs", json={"script": "/t.py", "workers_min": 7, "workers_max": 8})
        assert too_many.json()["errors"][0]["field"] == "/workers_min"
        wanted = await bed.http.post("/v1/jobs?allow_unsatisfiable=true", json={"script": "/t.py", "workers_min": 7})
        assert wanted.status_code == 201
        job = await bed.submit(workers_min=1, workers_max=8)
        raised = await bed.http.patch(f"/v1/jobs/{job['id']}", json={"workers_min": 7})
        assert raised.status_code == 422
