"""The path of GPUs as far as it needs no device: calls against the installed wheel, and a run with gloo for NCCL.

Gloo stands in for NCCL's collectives: flags are read every tenth step, and a lost peer ends the process, as it must
where a collective cannot be made to raise.
"""

import inspect
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.elastic_bed import ZygoteBed, wait_until
from tests.integration.elastic_coordinator import ElasticBed, applied_once, largest_difference

STAND_IN = """
import tidewright.elastic.group as group_module, tidewright.elastic.job as job_module
from tidewright.elastic.devices import Backend
made, make_gloo_group = {}, group_module.make_gloo_group
def remember(store, **place):
    return made.setdefault(place["generation"], make_gloo_group(store, **place))
group_module.make_gloo_group = remember
group_module.make_nccl_group = lambda store, **place: made.pop(place["generation"])
job_module.prepare_backend = lambda: Backend(name="nccl", device="cpu", flags_every_steps=10)
"""


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[ElasticBed]:
    zygote = ZygoteBed(tmp_path / "z")
    zygote.start()
    bed = ElasticBed.make(zygote, tmp_path)
    bed.script.write_text(
        bed.script.read_text().replace("paddle.set_default_dtype", STAND_IN + "paddle.set_default_dtype")
    )
    yield bed
    bed.close()
    zygote.stop()


def test_planned_resizes_are_live_and_happen_where_flags_are_read(bed: ElasticBed) -> None:
    c = bed.coordinator
    bed.start("a", epochs=40)
    c.resize(["a"], source=-1)
    bed.start("b", epochs=40)
    c.resize(["a", "b"])
    bed.start("c", epochs=40)
    c.resize(["b", "c"], leavers=["a"])
    bed.finish("a", "b", "c")
    assert bed.kinds("a")[-1] == "left"
    entries = bed.entries()
    adopted = {e["step"] for e in entries if e["k"] == "adopted"}
    assert adopted - {0} == {step for step in adopted if step % 10 == 1}
    applied_once(entries, samples=97, steps_per_epoch=7, total_steps=280)
    alone = bed.alone(epochs=40)
    assert all(largest_difference(result, alone) < 1e-12 for result in bed.results())


def test_survivors_of_a_lost_peer_end_to_be_replaced_from_a_checkpoint(bed: ElasticBed) -> None:
    c = bed.coordinator
    c.welcome = replace(c.welcome, checkpoint_every_steps=20)
    bed.start("a", "b", "c", epochs=40)
    c.resize(["a", "b", "c"], source=-1)
    wait_until(lambda: list((bed.base / "checkpoints").glob("g1-s*")))
    os.kill(bed.members["c"].worker_pid, signal.SIGKILL)
    for name in "ab":
        assert bed.members[name].exit()["code"] == -signal.SIGKILL
        assert "this process is to be replaced" in bed.members[name].log
    newest = max((bed.base / "checkpoints").glob("g1-s*"), key=lambda path: int(path.name[4:]))
    bed.start("x", "y", epochs=40)
    c.resize(["x", "y"], source=-1, checkpoint=str(newest))
    bed.finish("x", "y")
    alone = bed.alone(epochs=40)
    assert all(largest_difference(result, alone) < 1e-12 for result in bed.results())


def test_calls_fit_the_installed_wheel() -> None:
    """2.6.2 and 3.3.1 both take these; what NCCL makes of them needs a device."""
    collective = pytest.importorskip("paddle.distributed.collective")
    core = pytest.importorskip("paddle.base.core")
    signature = inspect.signature(collective._new_process_group_impl)
    bound = signature.bind("nccl", object(), 0, 2, "tide-3", None, group_id=3)
    assert list(bound.arguments)[:6] == ["backend", "store", "rank", "world_size", "group_name", "pg_options"]
    assert "nccl" in collective._valid_backend_list
    for name in ("all_reduce", "broadcast"):
        assert hasattr(core.ProcessGroup, name)
    if hasattr(core, "ProcessGroupNCCL"):
        text = core.ProcessGroupNCCL.create.__doc__
        assert "store" in text
        assert "group_id" in text
        assert hasattr(core.CommContextManager, "set_device_id")
