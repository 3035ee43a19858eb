"""Lists of jobs: an answer and a key for each, one that is refused spoils no other, and a bound for all together."""

import asyncio
import json

from schemas.events.job import JobSubmitted
from services.intake.settings import IntakeSettings
from shared.testing.harness import read_data, read_log, read_rows
from tests.integration.intake_bed import intake_bed

YAML = {"Content-Type": "application/yaml"}


def job(number: int, **more: object) -> dict[str, object]:
    return {"command": ["true"], "name": f"n{number}", "idempotency_key": f"k{number}", **more}


async def post(bed, jobs, **parameters):
    return await bed.http.post("/v1/jobs", json=jobs, params=parameters)


async def test_each_job_is_answered_in_the_order_of_the_list_and_published_in_it(database):
    async with intake_bed(database) as bed:
        answer = await post(bed, [job(n) for n in range(200)])
        assert answer.status_code == 200
        answers = answer.json()["answers"]
        assert [(each["status"], each["name"]) for each in answers] == [(201, f"n{n}") for n in range(200)]
        submitted = [event for event in await read_log(database) if isinstance(event.data, JobSubmitted)]
        assert [event.key for event in submitted] == [each["id"] for each in answers]
        assert (await bed.http.get(f"/v1/jobs/{answers[7]['id']}")).json()["name"] == "n7"


async def test_a_job_that_is_refused_spoils_no_other_and_is_named_by_its_place(database):
    async with intake_bed(database) as bed:
        wrong = [job(1), {"name": "no-command"}, 7, job(2, workers_min=0), job(3, name="\u0000"), job(4)]
        answers = (await post(bed, wrong)).json()["answers"]
        assert [each["status"] for each in answers] == [201, 422, 422, 422, 422, 201]
        fields = [each["problem"]["errors"][0]["field"] for each in answers[1:5]]
        assert fields[1:3] == ["/2", "/3/workers_min"]
        assert all(field.startswith(f"/{n}") for n, field in enumerate(fields, start=1))
        assert all(each["problem"]["errors"][0]["way_out"] for each in answers[1:5])
        names = [data.spec.name for data in await read_data(database, JobSubmitted)]
        assert names == ["n1", "n4"]


async def test_a_list_that_is_sent_again_makes_no_second_jobs(database):
    async with intake_bed(database) as bed:
        jobs = [job(n) for n in range(20)]
        first = (await post(bed, jobs)).json()["answers"]
        again = (await post(bed, [*jobs[10:], job(99)])).json()["answers"]
        assert [each["id"] for each in again[:10]] == [each["id"] for each in first[10:]]
        assert [each["status"] for each in again] == [200] * 10 + [201]
        alone = await bed.http.post(
            "/v1/jobs", json={"command": ["true"], "name": "n3"}, headers={"Idempotency-Key": "k3"}
        )
        assert (alone.status_code, alone.json()["id"]) == (200, first[3]["id"]), "one key, one job, however it comes"
        other = (await post(bed, [job(3, name="another")])).json()["answers"][0]
        assert (other["status"], other["problem"]["type"]) == (422, "urn:tidewright:problem:idempotency_key_reused")


async def test_a_key_twice_in_one_list_is_one_job(database):
    async with intake_bed(database) as bed:
        answers = (await post(bed, [job(1), job(1), job(1, name="other")])).json()["answers"]
        assert [each["status"] for each in answers] == [201, 200, 422]
        assert answers[0]["id"] == answers[1]["id"]


async def test_the_list_as_a_whole_is_refused_with_the_way_out(database):
    async with intake_bed(database, settings=IntakeSettings(bulk_jobs_max=5)) as bed:
        long = await post(bed, [job(n) for n in range(6)])
        assert (long.status_code, long.json()["errors"][0]["way_out"]) == (422, "send 1 to 5 jobs in one list")
        headers = {"Idempotency-Key": "all"}
        keyed = await bed.http.post("/v1/jobs", json=[job(1)], headers=headers)
        assert keyed.status_code == 422
        assert "idempotency_key" in keyed.json()["errors"][0]["way_out"]
        broken = await bed.http.post(
            "/v1/jobs", content=b'[{"command": ["true"]},', headers={"Content-Type": "application/json"}
        )
        assert broken.status_code == 400
        assert await read_data(database, JobSubmitted) == []


async def test_yaml_lists_are_understood(database):
    async with intake_bed(database) as bed:
        answer = await bed.http.post("/v1/jobs", content="- command: ['true']\n- command: ['false']\n", headers=YAML)
        assert [each["status"] for each in answer.json()["answers"]] == [201, 201]


async def test_above_the_bound_of_unwritten_submissions_nothing_of_the_list_is_taken(database):
    async with intake_bed(database, settings=IntakeSettings(unwritten_jobs_max=10)) as bed:
        refused = await post(bed, [job(n) for n in range(11)])
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert await read_rows(database, "select count(*) as n from intake.jobs") == [{"n": 0}]
        assert (await post(bed, [job(n) for n in range(10)])).status_code == 200


async def test_others_are_answered_while_a_long_list_is_judged(database):
    async with intake_bed(database) as bed:
        content = json.dumps([job(n, labels={f"l{i}": "x" for i in range(10)}) for n in range(1_000)])
        async with bed.in_process() as http, asyncio.TaskGroup() as group:
            headers = {"Content-Type": "application/json"}
            bulk = group.create_task(http.post("/v1/jobs", content=content, headers=headers))
            answered = 0
            while not bulk.done():
                assert (await http.get("/livez")).status_code == 200
                answered += 1
                await asyncio.sleep(0)
        assert bulk.result().status_code == 200
        assert answered >= 5, "the list was judged in one go"
