"""Bad input: each case is answered with its status, the field and the way out, and leaves nothing behind."""

import json
from dataclasses import dataclass

import pytest

from services.intake.settings import IntakeSettings
from shared.testing.harness import read_rows
from tests.integration.intake_bed import intake_bed

JSON = "application/json"
YAML = "application/yaml"
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@dataclass(frozen=True)
class Case:
    """``way_out`` and ``detail``: words that the answer must have."""

    name: str
    body: bytes
    status: int
    field: str
    way_out: str
    kind: str = JSON
    detail: str = ""


def body(**fields):
    return json.dumps({"script": "/jobs/train.py", **fields}).encode()


CASES = (
    Case("malformed json", b'{"script": "/t.py",}', 400, "", "one JSON object", detail="line 1"),
    Case("cut off json", b'{"script": "/t', 400, "", "one JSON object"),
    Case("json that is not utf-8", b'{"script": "\xff"}', 400, "", "UTF-8"),
    Case("empty body", b"", 400, "", "JSON or YAML"),
    Case("an empty list", b"[]", 422, "", "1 to 1000 jobs", detail="has 0 jobs"),
    Case("malformed yaml", b"script: [1, 2\nname: x", 400, "", "indentation", YAML, "line"),
    Case("yaml with a tab", b"script: x\n\tname: y", 400, "", "indentation", YAML),
    Case("two yaml documents", b"script: a\n---\nscript: b\n", 400, "", "one document", YAML),
    Case("yaml with a tag", b"script: !!python/object/apply:os.system [id]", 422, "/script", "tags", YAML),
    Case("billion laughs", LAUGHS.encode(), 422, "", "aliases", YAML, "too many"),
    Case("yaml that contains itself", b"labels: &a {x: *a}", 400, "", "write the value out", YAML),
    Case("deep yaml", b"labels: " + b"[" * 5000 + b"]" * 5000, 422, "", "levels", YAML, "deep"),
    Case("deep json", b'{"labels": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 422, "", "levels", detail="deep"),
    Case("a key twice in yaml", b"script: a\nscript: b", 422, "/script", "one of the two", YAML),
    Case("a key twice in json", b'{"script": "a", "script": "b"}', 422, "/script", "one of the two"),
    Case("a nested key twice", b"labels:\n  a: x\n  a: y\n", 422, "/labels/a", "one of the two", YAML),
    Case("a key that is a list", b"? [a]\n: b", 422, "", "plain words", YAML),
    Case("another content type", b"script=x", 415, "", "application/json", "application/x-www-form-urlencoded"),
    Case("unknown field", body(worker_min=2), 422, "/worker_min", "workers_min"),
    Case("unknown nested field", body(resources={"gpus": 1}), 422, "/resources/gpus", "accelerators"),
    Case("nothing to run", b"{}", 422, "/script", "command"),
    Case("script and command", body(command=["python"]), 422, "/command", "not both"),
    Case("empty command", b'{"command": []}', 422, "/command", "a list"),
    Case("command as text", b'{"command": "python x.py"}', 422, "/command", "a list"),
    Case("min over max", body(workers_min=4, workers_max=2), 422, "/workers_min", "at most 2"),
    Case("start size outside", body(workers_max=4, workers=5), 422, "/workers", "from 1 to 4"),
    Case("two sizes of a fixed job", body(mode="fixed", workers_min=1, workers_max=2), 422, "/workers_min", "alone"),
    Case("zero workers", body(workers_min=0), 422, "/workers_min", "at least 1"),
    Case("negative workers", body(workers_max=-3), 422, "/workers_max", "at least 1"),
    Case("too many workers", body(workers_max=10**9), 422, "/workers_max", "at most 10000"),
    Case("half a worker", body(workers_min=1.5), 422, "/workers_min", "integer"),
    Case("workers as text", body(workers_min="2"), 422, "/workers_min", "integer"),
    Case("workers as truth", body(workers_min=True), 422, "/workers_min", "integer"),
    Case("zero seconds", body(grace_seconds=0), 422, "/grace_seconds", "more than 0"),
    Case("negative seconds", body(grace_seconds=-1), 422, "/grace_seconds", "more than 0"),
    Case("NaN", b'{"script": "/t.py", "grace_seconds": NaN}', 422, "", "finite"),
    Case("infinity in json", b'{"script": "/t.py", "grace_seconds": 1e999}', 422, "/grace_seconds", "finite"),
    Case("NaN in yaml", b"script: /t.py\ngrace_seconds: .nan", 422, "/grace_seconds", "finite", YAML),
    Case("infinity in yaml", b"script: /t.py\nresources: {cpu: .inf}", 422, "/resources/cpu", "finite", YAML),
    Case("a number of 5000 digits", b'{"script": "/t.py", "workers": ' + b"9" * 5000 + b"}", 422, "", "usual size"),
    Case("a truth that yaml 1.1 knew", b"script: /t.py\nheld: yes", 422, "/held", "true or false", YAML),
    Case("priority that does not exist", body(priority="urgent"), 422, "/priority", "critical"),
    Case("NUL in a value", body(name="x", labels={"a": "b\0"}), 422, "/labels/a", "\\u0000"),
    Case("NUL in a key", body(environment={"A\0B": "x"}), 422, "/environment", "\\u0000"),
    Case("NUL in yaml", b'script: "/t\\0.py"', 422, "/script", "\\u0000", YAML),
    Case("half a surrogate", b'{"script": "\\ud800"}', 400, "", "JSON"),
    Case("cpu of zero", body(resources={"cpu": 0}), 422, "/resources/cpu", "leave"),
    Case("negative memory", body(resources={"memory": "-1Gi"}), 422, "/resources/memory", "leave"),
    Case("memory in words", body(resources={"memory": "lots"}), 422, "/resources/memory", "512Mi"),
    Case("half a byte", body(resources={"memory": "1500m"}), 422, "/resources/memory", "512Mi", detail="finer"),
    Case("cpu too fine", body(resources={"cpu": "0.0001"}), 422, "/resources/cpu", "500m", detail="finer"),
    Case("memory of the universe", body(resources={"memory": "9000000Ei"}), 422, "/resources/memory", "512Mi"),
    Case("cpu as truth", body(resources={"cpu": True}), 422, "/resources/cpu", "500m"),
    Case("deeper yaml", b"labels: " + b"[" * 40 + b"]" * 40, 422, "", "levels", YAML, "deep"),
    Case("environment with a number", body(environment={"N": 1}), 422, "/environment/N", "string"),
    Case("environment with a bad name", body(environment={"1A": "x"}), 422, "/environment/1A", "digit"),
    Case("environment of the system", body(environment={"TIDE_TOKEN": ""}), 422, "/environment/TIDE_TOKEN", "other"),
    Case("large environment", body(environment=dict.fromkeys("ABC", "x" * 60_000)), 422, "/environment", "file"),
    Case("bad name", body(name="Über job"), 422, "/name", "match"),
    Case("bad label", body(labels={"a b": "c"}), 422, "/labels/a b", "letters"),
    Case("deadline without a zone", body(finish_by="2031-01-01T00:00:00"), 422, "/finish_by", "offset"),
    Case("deadline in words", body(finish_by="tomorrow"), 422, "/finish_by", "2030"),
    Case("exit codes, no kind", body(restart_policy={"exit_codes": [3]}), 422, "/restart_policy/exit_codes", "kind"),
    Case("relative working folder", body(working_directory="work"), 422, "/working_directory", "root"),
)  # fmt: skip


@pytest.fixture(scope="module")
def module_database(postgres):
    with postgres.database() as database:
        yield database


async def test_every_case_names_the_field_and_the_way_out(module_database):
    wrong = []
    async with intake_bed(module_database) as bed:
        for case in CASES:
            answer = await bed.http.post("/v1/jobs", content=case.body, headers={"Content-Type": case.kind})
            wrong += [f"{case.name}: {problem}" for problem in differences(case, answer)]
        health = await bed.http.get("/livez")
        assert health.status_code == 200
    assert not wrong, "\n".join(wrong)
    [row] = await read_rows(module_database, "select count(*) n from intake.jobs")
    assert row["n"] == 0


def differences(case, answer):
    if answer.status_code != case.status:
        return [f"status {answer.status_code}, not {case.status}: {answer.text[:300]}"]
    if answer.headers["content-type"] != "application/problem+json":
        return [f"content type {answer.headers['content-type']}"]
    problem = answer.json()
    errors = [error for error in problem["errors"] if error["field"] == case.field]
    found = []
    if not errors:
        found.append(f"no error for {case.field!r}: {problem['errors']}")
    elif not any(case.way_out in error["way_out"] for error in errors):
        found.append(f"way out lacks {case.way_out!r}: {errors}")
    if case.detail and case.detail not in answer.text:
        found.append(f"detail lacks {case.detail!r}: {answer.text[:300]}")
    return found


async def test_huge_bodies_are_refused_before_they_are_read(database):
    settings = IntakeSettings(body_bytes_max=2048, bulk_bytes_max=3000)
    async with intake_bed(database, settings=settings) as bed:
        announced = await bed.http.post("/v1/jobs", content=b"x" * 4096, headers={"Content-Type": JSON})
        assert announced.status_code == 413

        async def chunks():
            for _ in range(64):
                yield b" " * 64

        streamed = await bed.http.post("/v1/jobs", content=chunks(), headers={"Content-Type": JSON})
        assert streamed.status_code == 413
        assert "3000 bytes" in streamed.json()["detail"]
        single = await bed.http.post("/v1/jobs", content=b"{" + b" " * 2048, headers={"Content-Type": JSON})
        assert single.status_code == 413
        assert "2048 bytes" in single.json()["detail"]


async def test_errors_do_not_repeat_secrets(database):
    async with intake_bed(database) as bed:
        secret = {"environment": {"1TOKEN": "sesame", "OTHER": 7}, "script": "/t.py", "labels": {"a": ["sesame"]}}
        answer = await bed.http.post("/v1/jobs", json=secret)
        assert answer.status_code == 422
        assert "sesame" not in answer.text


async def test_all_that_is_wrong_is_told_at_once(database):
    async with intake_bed(database) as bed:
        wrong = {"workers_min": 3, "workers_max": 2, "resources": {"cpu": "x"}, "labels": {"-": "x"}}
        answer = await bed.http.post("/v1/jobs", json=wrong)
        fields = {error["field"] for error in answer.json()["errors"]}
        assert fields == {"/script", "/workers_min", "/resources/cpu", "/labels/-"}
        assert all(error["way_out"] for error in answer.json()["errors"])


async def test_unknown_jobs(database):
    async with intake_bed(database) as bed:
        for job_id in ("j00000000000000000000000000", "nonsense", "j%00", "..%2fx"):
            for path in ("", "/cancel", "/why", "/history", "/logs", "/members", "/curves"):
                method = "POST" if path == "/cancel" else "GET"
                answer = await bed.http.request(method, f"/v1/jobs/{job_id}{path}")
                assert answer.status_code == 404, (job_id, path, answer.text)
                assert answer.headers["content-type"] == "application/problem+json"
        changed = await bed.http.patch("/v1/jobs/j00000000000000000000000000", json={"held": True})
        assert changed.status_code == 404


BAD_REQUESTS = (
    ("GET", "/v1/jobs?phase=Flying", None, 422, "/phase/0"),
    ("GET", "/v1/jobs?limit=0", None, 422, "/limit"),
    ("GET", "/v1/jobs?limit=many", None, 422, "/limit"),
    ("GET", "/v1/jobs?cursor=abc", None, 422, "/cursor"),
    ("GET", "/v1/jobs?queue=a%00", None, 422, "/queue"),
    ("GET", "/v1/jobs?label=%00", None, 422, "/label/0"),
    ("GET", "/v1/jobs?priority=urgent", None, 422, "/priority"),
    ("GET", "/v1/events?job_id=j00000000000000000000000000", None, 404, None),
    ("PATCH", "/v1/jobs/{id}", {}, 422, ""),
    ("PATCH", "/v1/jobs/{id}", {"reason": "because"}, 422, ""),
    ("PATCH", "/v1/jobs/{id}", {"workers_min": 9}, 422, "/workers_min"),
    ("PATCH", "/v1/jobs/{id}", {"workers": 9}, 422, "/workers"),
    ("PATCH", "/v1/jobs/{id}", {"workers": 0}, 422, "/workers"),
    ("PATCH", "/v1/jobs/{id}", {"name": "x"}, 422, "/name"),
    ("PATCH", "/v1/jobs/{id}", {"held": "yes"}, 422, "/held"),
    ("POST", "/v1/jobs/{id}/cancel", {"why": "x"}, 422, "/why"),
    ("DELETE", "/v1/jobs/{id}", None, 405, None),
    ("GET", "/v2/jobs", None, 404, None),
    ("GET", "/v1/jobs/{id}/history?cursor=x", None, 422, "/cursor"),
    ("GET", "/v1/jobs/{id}/history?cursor=1-99999999999999999999", None, 422, "/cursor"),
    ("GET", "/v1/jobs/{id}/logs?tail=-1", None, 422, "/tail"),
)


async def test_bad_requests(database):
    async with intake_bed(database) as bed:
        job = await bed.submit(workers_max=4)
        for method, path, sent, status, field in BAD_REQUESTS:
            answer = await bed.http.request(method, path.replace("{id}", str(job["id"])), json=sent)
            assert answer.status_code == status, (path, answer.text)
            problem = answer.json()
            assert problem["type"].startswith("urn:tidewright:problem:"), path
            if field is not None:
                assert [error["field"] for error in problem["errors"]] == [field], (path, problem)
        one = f"/v1/jobs/{job['id']}"
        for method, path, header, value in (
            ("POST", "/v1/jobs", "Idempotency-Key", "a b"),
            ("POST", "/v1/jobs", "Idempotency-Key", "k" * 256),
            ("PATCH", one, "If-Match", "three"),
            ("GET", "/v1/events", "Last-Event-ID", "x-1"),
        ):
            answer = await bed.http.request(method, path, json={"script": "/t.py"}, headers={header: value})
            assert answer.status_code == 422, (header, answer.text)
            assert answer.json()["errors"][0]["field"] == f"/{header}"
