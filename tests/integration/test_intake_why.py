"""Why a job is as it is, its history and the cluster, over HTTP; tenants and rights in the database."""

from datetime import timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.exc import ProgrammingError

from schemas.envelope import Draft
from schemas.events.allocation import AllocationWaiting, QueueObserved
from schemas.events.capacity import NodeMembers
from schemas.events.scaling import ScalingProposed
from schemas.vocabulary import DEFAULT_TENANT, JobId, ServiceName, WaitCode
from shared.clock import SystemClock
from tests.integration.intake_bed import capacity, granted, intake_bed, started


async def why(bed, job):
    answer = await bed.http.get(f"/v1/jobs/{job['id']}/why")
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_right_after_the_submission(database):
    async with intake_bed(database) as bed:
        job = await bed.submit()
        told = await why(bed, job)
        assert told["waiting"]["code"] == "NOT_YET_CONSIDERED"
        assert told["decision"] is None
        await bed.fold()
        assert (await why(bed, job))["waiting"]["code"] == "NOT_YET_CONSIDERED"


async def test_an_examined_job_has_queueing_s_own_words(database):
    async with intake_bed(database) as bed:
        job = await bed.submit()
        waits = AllocationWaiting(code=WaitCode.NO_ROOM, detail="needs 4, 1 is free", unblocked_by="the end of b")
        await bed.say(ServiceName.QUEUEING, str(job["id"]), waits)
        told = await why(bed, job)
        assert told["summary"] == "needs 4, 1 is free."
        assert told["waiting"]["unblocked_by"] == "the end of b"


async def test_the_others_have_their_place(database):
    async with intake_bed(database) as bed:
        first, second = await bed.submit(), await bed.submit(priority="high")
        await bed.submit(priority="critical", queue="elsewhere")
        await bed.submit(priority="critical", held=True)
        gone = await bed.submit(priority="critical")
        runs = await bed.submit(priority="critical")
        last = await bed.submit()
        await bed.http.post(f"/v1/jobs/{gone['id']}/cancel")
        await bed.say(ServiceName.QUEUEING, str(runs["id"]), granted())
        seen = QueueObserved(
            pending=(),
            head=str(second["id"]),
            head_code=WaitCode.NO_ROOM,
            head_detail="needs 4 slots",
            starts_per_minute=6,
        )
        await bed.say(ServiceName.QUEUEING, "default", seen)
        told = await why(bed, last)
        assert told["queue_ahead"] == 2
        assert told["summary"] == "2 jobs are ahead in queue default; the head waits: needs 4 slots."
        assert told["waiting"]["start_estimate_seconds"] == 30
        assert (await why(bed, first))["queue_ahead"] == 1
        listed = {item["id"]: item for item in (await bed.http.get("/v1/jobs")).json()["items"]}
        assert listed[last["id"]]["waiting"]["code"] == "BEHIND_IN_QUEUE"


async def test_a_running_job_names_its_last_decision_and_proposal(database):
    async with intake_bed(database) as bed:
        job = await bed.submit(workers_max=4)
        await bed.say(ServiceName.QUEUEING, str(job["id"]), granted(workers=1))
        await bed.say(ServiceName.EXECUTION, str(job["id"]), started())
        proposal = ScalingProposed(epoch=1, workers=2, gain_per_worker=0.5, reason="above the band")
        await bed.say(ServiceName.SCALING, str(job["id"]), proposal)
        told = await why(bed, job)
        assert told["phase"] == "Running"
        assert "Granted 1 worker (ADMITTED_IDLE)" in told["summary"]
        assert told["decision"]["type"] == "tide.allocation.granted.v1"
        assert told["scaling"]["data"]["reason"] == "above the band"


async def test_silence_of_execution_is_told(database):
    class Later(SystemClock):
        ahead = timedelta()

        def now(self):
            return super().now() + self.ahead

    clock = Later()
    async with intake_bed(database, clock=clock) as bed:
        await bed.say(ServiceName.EXECUTION, "cluster", capacity(4))
        job = await bed.submit()
        assert "reported nothing" not in (await why(bed, job))["summary"]
        clock.ahead = timedelta(seconds=100)
        assert "Execution has reported nothing for 10" in (await why(bed, job))["summary"]


async def test_history_comes_in_pages_and_has_what_users_did(database):
    async with intake_bed(database) as bed:
        job = await bed.submit()
        path = f"/v1/jobs/{job['id']}"
        await bed.http.patch(path, json={"priority": "high", "reason": "launch"})
        await bed.say(ServiceName.QUEUEING, str(job["id"]), granted())
        first = (await bed.http.get(f"{path}/history", params={"limit": 2})).json()
        assert [entry["type"] for entry in first["items"]] == ["tide.job.submitted.v1", "tide.job.changed.v1"]
        assert first["items"][1]["summary"].endswith("priority high, 1 worker: launch.")
        rest = (await bed.http.get(f"{path}/history", params={"cursor": first["next_cursor"]})).json()
        assert [entry["type"] for entry in rest["items"]] == ["tide.allocation.granted.v1"]
        assert rest["next_cursor"] is None


async def test_the_cluster_and_who_holds_it(database):
    async with intake_bed(database) as bed:
        unknown = (await bed.http.get("/v1/capacity")).json()
        assert unknown == {"revision": 0, "nodes": [], "lost_nodes": []}
        job = await bed.submit(name="mine")
        foreign = JobId("j0000000000000000000000zzzz")
        seen = capacity(4)
        members = tuple(NodeMembers(job_id=JobId(str(key)), role="worker", members=1) for key in (job["id"], foreign))
        node = type(seen.nodes[0])(
            **{name: getattr(seen.nodes[0], name) for name in ("name", "flavor", "allocatable", "used_by_others")},
            members=members,
        )
        await bed.say(ServiceName.EXECUTION, "cluster", type(seen)(revision=2, nodes=(node,)))
        told = (await bed.http.get("/v1/capacity")).json()
        assert told["revision"] == 2
        assert [holder["name"] for holder in told["nodes"][0]["holders"]] == ["mine", "another job"]
        assert foreign not in str(told)


async def test_jobs_of_another_tenant_do_not_exist(database):
    async with intake_bed(database) as bed:
        job = await bed.submit()
        await bed.fold()
        database.psql("update intake.jobs set tenant = 'other'")
        path = f"/v1/jobs/{job['id']}"
        for method, part in (("GET", ""), ("GET", "/why"), ("GET", "/history"), ("GET", "/logs"), ("GET", "/members"),
                             ("GET", "/curves"), ("POST", "/cancel"), ("PATCH", "")):  # fmt: skip
            sent = {"held": True} if method == "PATCH" else None
            assert (await bed.http.request(method, path + part, json=sent)).status_code == 404, part
        assert (await bed.http.get(f"/v1/events?job_id={job['id']}")).status_code == 404
        assert (await bed.http.get("/v1/jobs")).json()["items"] == []


async def test_execution_may_read_environments_and_nothing_else(database):
    async with database.engine(ServiceName.EXECUTION) as engine:
        async with engine.connect() as connection:
            assert (await connection.execute(text("select count(*) from intake.environments"))).scalar() == 0
        for statement in (
            "select count(*) from intake.jobs",
            "insert into intake.environments values ('j1', '{}')",
            "delete from intake.environments",
        ):
            async with engine.connect() as connection:
                with pytest.raises(ProgrammingError, match="permission denied"):
                    await connection.execute(text(statement))


async def test_a_tenant_s_queue_is_its_own(database):
    async with intake_bed(database) as bed:
        job = await bed.submit()
        seen = QueueObserved(pending=(), head="x", head_code=None, head_detail="theirs", starts_per_minute=1)
        await bed.run.publish(ServiceName.QUEUEING, Draft(key="default", tenant="other", data=seen))
        await bed.fold()
        assert (await why(bed, job))["waiting"]["code"] == "NOT_YET_CONSIDERED"
        await bed.run.publish(ServiceName.QUEUEING, Draft(key="default", tenant=DEFAULT_TENANT, data=seen))
        await bed.fold()
        assert (await why(bed, job))["waiting"]["code"] == "BEHIND_IN_QUEUE"
