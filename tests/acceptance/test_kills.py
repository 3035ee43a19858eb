"""Eight kills at random moments through the command: nothing lost, nothing twice, nothing left. Fifty by hand."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SEED = os.environ.get("TIDE_KILLS_SEED", "4")


@pytest.mark.timeout(290)
def test_whatever_is_killed_no_job_is_lost_run_twice_or_left_over(tmp_path):
    path = tmp_path / "kills.json"
    command = [sys.executable, "-m", "loadtests.kills", "--quick", f"--seed={SEED}", f"--json={path}"]
    done = subprocess.run(
        [*command, f"--out={tmp_path / 'record'}"], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    told = done.stdout + done.stderr
    assert path.exists(), told
    results = json.loads(path.read_text())["results"]
    gap = results.pop("longest_step_gap_seconds")
    assert results == {"kills": 8, "lost": 0, "run_twice": 0, "left_over": 0}, told
    assert 0 < gap <= 2, told
    assert done.returncode == 0, told
