"""The OpenAPI document: valid, complete, and true of what the routes answer."""

import jsonschema
import pytest
from fastapi.openapi.models import OpenAPI
from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from schemas.vocabulary import ServiceName
from tests.integration.intake_bed import capacity, granted, intake_bed, started

ROUTES = {
    ("post", "/v1/jobs"): {"200", "201", "400", "413", "415", "422", "429", "503"},
    ("get", "/v1/jobs"): {"200", "422"},
    ("get", "/v1/jobs/{job_id}"): {"200", "404"},
    ("patch", "/v1/jobs/{job_id}"): {"200", "404", "409", "412", "422"},
    ("post", "/v1/jobs/{job_id}/cancel"): {"202", "404", "409"},
    ("get", "/v1/jobs/{job_id}/why"): {"200", "404"},
    ("get", "/v1/jobs/{job_id}/history"): {"200", "404"},
    ("get", "/v1/jobs/{job_id}/logs"): {"200", "404", "503"},
    ("get", "/v1/jobs/{job_id}/curves"): {"200", "404", "503"},
    ("get", "/v1/jobs/{job_id}/members"): {"200", "404", "503"},
    ("get", "/v1/capacity"): {"200"},
    ("get", "/v1/events"): {"200", "404", "429"},
    ("get", "/livez"): {"200"},
    ("get", "/readyz"): {"200"},
    ("get", "/metrics"): {"200"},
}
BODIES = {("post", "/v1/jobs"): "SubmitJob", ("patch", "/v1/jobs/{job_id}"): "PatchJob"}


@pytest.fixture
async def document(database):
    async with intake_bed(database) as bed:
        answer = await bed.http.get("/openapi.json")
        assert answer.status_code == 200
        yield answer.json()


def references(node):
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


async def test_the_document_is_valid(document):
    OpenAPI.model_validate(document)
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    for reference in references(document):
        assert reference.removeprefix("#/components/schemas/") in schemas, reference
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(names) == len(set(names))


async def test_every_route_is_described(document):
    found = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert found == set(ROUTES)
    for (method, path), statuses in ROUTES.items():
        operation = document["paths"][path][method]
        assert statuses <= set(operation["responses"]), (method, path)
        assert operation["summary"], (method, path)
        for status, response in operation["responses"].items():
            if path.startswith("/v1") and int(status) >= 400:
                assert "application/problem+json" in response["content"], (method, path, status)


async def test_bodies_are_described_in_json_and_yaml(document):
    for (method, path), model in BODIES.items():
        content = document["paths"][path][method]["requestBody"]["content"]
        assert {"application/json", "application/yaml"} <= set(content)
        reference = {"$ref": f"#/components/schemas/{model}"}
        assert all(reference in kind["schema"].get("oneOf", [kind["schema"]]) for kind in content.values())
    submit = document["components"]["schemas"]["SubmitJob"]
    assert submit["additionalProperties"] is False
    parameters = document["paths"]["/v1/jobs"]["post"]["parameters"]
    assert {"Idempotency-Key", "allow_unsatisfiable"} <= {parameter["name"] for parameter in parameters}


async def test_answers_are_as_described(database):
    async with intake_bed(database) as bed:
        document = (await bed.http.get("/openapi.json")).json()
        job = await bed.submit(workers_max=2, finish_by="2031-01-01T00:00:00Z")
        path = f"/v1/jobs/{job['id']}"
        await bed.say(ServiceName.EXECUTION, "cluster", capacity(4))
        await bed.say(ServiceName.QUEUEING, str(job["id"]), granted())
        await bed.say(ServiceName.EXECUTION, str(job["id"]), started())
        for url, model in (
            (path, "JobView"),
            ("/v1/jobs", "JobList"),
            (f"{path}/why", "WhyView"),
            (f"{path}/history", "History"),
            ("/v1/capacity", "CapacityView"),
            ("/v1/jobs/nonsense", "Problem"),
        ):
            validate((await bed.http.get(url)).json(), model, document)


def validate(answer, model, document):
    resource = Resource.from_contents(document, default_specification=DRAFT202012)
    registry = Registry().with_resource("urn:document", resource)
    schema = {"$ref": f"urn:document#/components/schemas/{model}"}
    validator = Draft202012Validator(schema, registry=registry, format_checker=jsonschema.FormatChecker())
    errors = [error.message for error in validator.iter_errors(answer)]
    assert not errors, (model, errors)
