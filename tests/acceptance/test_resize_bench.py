"""The benchmark of resizes measures what it says: real processes at each size, every figure there. Never how fast."""

import json
import math
import os
import statistics
from pathlib import Path

from loadtests import resize

NAMES = {
    "http_to_first_step_seconds",
    "live_2_4_seconds",
    "live_4_2_seconds",
    "gap_2_4_seconds",
    "kill_to_next_step_seconds",
    "restart_2_4_seconds",
}


def test_it_resizes_kills_and_restarts_real_processes(tmp_path: Path, capsys):
    resize.main(["--quick", "--repeats", "1", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert set(found["results"]) == NAMES
    assert all(math.isfinite(value) and value > 0 for value in found["results"].values()), found["results"]

    (two,), (four,) = found["pids"]["2"], found["pids"]["4"]
    assert (len(set(two)), len(set(four))) == (2, 4)
    assert four[:2] == two, "those who stay keep their processes, when others come and when they go"
    assert os.getpid() not in four

    (grown,), killed = found["grown"], found["killed"]
    assert grown["http"] > grown["live"] > 0, "the request comes before execution has it"
    assert grown["stages"] == dict(sorted(grown["stages"].items(), key=lambda stage: stage[1])), "one after the other"
    assert [len(seconds) for seconds in killed.values()] == [1, 1]
    assert found["results"]["kill_to_next_step_seconds"] == round(
        statistics.median([*killed["rank 0"], *killed["another"]]), 4
    )
    table = capsys.readouterr().out
    for line in ("2 -> 4, HTTP request to first step", "SIGKILL of rank 0", "restart / live"):
        assert line in table
