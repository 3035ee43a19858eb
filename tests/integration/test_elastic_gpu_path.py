"""The path of GPUs as far as it needs no device: calls against the installed wheel, and a run with gloo for NCCL.

Gloo stands in for NCCL's collectives: flags are read every tenth step, and a lost peer ends the process, as it must
where a collective cannot be made to raise.
"""

import inspect
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.execution.membership.rendezvous import RendezvousStore
from tests.integration.elastic_bed import ZygoteBed, wait_until
from tests.integration.elastic_coordinator import ElasticBed, largest_difference
from tests.integration.wheel_signatures import DoesNotFit, check_shape, natives_of, uses
from tidewright import protocol

pytest.importorskip("paddle")
from tidewright.elastic.backend import (
    NCCL_GROUP_ID_FIRST,
    core,
    make_nccl_group,
    paddle,
    prepare_backend,
)
from tidewright.elastic.group import Group

SOURCE = Path(__file__).parents[2] / "tidewright" / "elastic"

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
    bed.applied_once(samples=97, steps_per_epoch=7, total_steps=280)
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


# -- calls against the installed wheel ---------------------------------------------------------------------------


def the_wheel(name: str) -> Any:
    """A dotted name of Paddle's C++ module; skips, and says so, where the wheel was built without it."""
    found: Any = core
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None:
            pytest.skip(f"{name} is not in this wheel (Paddle {paddle.__version__}): make test-gpu-wheel has it")
    return found


def test_every_name_of_paddle_in_the_trainer_is_there_and_takes_its_arguments() -> None:
    checked = []
    for use in uses(SOURCE, ("paddle", "core")):
        found: Any = core if use.path[0] == "core" else paddle
        for part in use.path[1:]:
            assert hasattr(found, part), f"{use.where}: {'.'.join(use.path)} is not in Paddle {paddle.__version__}"
            found = getattr(found, part)
        if use.call is not None:
            check_shape(use.call, found)
            checked.append(".".join(use.path))
    assert {"core.TCPStore", "core.ProcessGroupGloo.create", "core.CommContextManager.set_device_id"} <= set(checked)


@pytest.mark.parametrize(
    ("call", "fits"),
    [
        ("core.TCPStore('h', 1, False, 0, 60)", True),
        ("core.TCPStore('h', 1, False, 0, seconds=60)", False),
        ("core.TCPStore('h', 1, False)", False),
        ("core.ProcessGroupGloo.create(store, rank, world, 7)", True),
        ("core.ProcessGroupGloo.create(store, rank, world, group=7)", False),
        ("core.CommContextManager.set_device_id()", False),
        ("core.ProcessGroup.broadcast(group, tensor, 0, True)", True),
        ("core.ProcessGroup.broadcast(group, tensor)", False),
    ],
)
def test_a_call_that_does_not_fit_is_noticed(tmp_path: Path, call: str, fits: bool) -> None:
    (tmp_path / "one.py").write_text(call)
    (use,) = [use for use in uses(tmp_path, ("core",)) if use.call is not None]
    with nullcontext() if fits else pytest.raises(DoesNotFit):
        found = core
        for part in use.path[1:]:
            found = getattr(found, part)
        check_shape(use.call, found)


class Calls:
    """Takes the calls that need a device: binds each to the wheel's own signature, and keeps it."""

    def __init__(self) -> None:
        self.made: list[tuple[str, dict[str, Any]]] = []

    def taking(self, name: str, *, answer: Any = None, of_an_object: bool = False) -> Any:
        natives = natives_of(the_wheel(name))

        def take(*arguments: Any, **named: Any) -> Any:
            refusals = []
            for native in natives:
                try:
                    bound = (native.without_self() if of_an_object else native).check(core, *arguments, **named)
                except DoesNotFit as error:
                    refusals.append(str(error))
                else:
                    self.made.append((name, bound))
                    return answer
            raise DoesNotFit(f"{name}: {'; '.join(refusals)}")

        return take


def test_the_calls_of_the_nccl_path_bind_to_the_wheels_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the choice of the backend to collectives, through the wheel's own Python code, which adds arguments."""
    the_wheel("ProcessGroupNCCL")
    calls = Calls()
    task = SimpleNamespace(wait=calls.taking("task.wait", of_an_object=True, answer=True))
    nccl = SimpleNamespace(
        all_reduce=calls.taking("ProcessGroup.all_reduce", of_an_object=True, answer=task),
        broadcast=calls.taking("ProcessGroup.broadcast", of_an_object=True, answer=task),
    )
    for name, answer in (("ProcessGroupNCCL.create", nccl), ("CommContextManager.set_device_id", None)):
        owner, _, method = name.partition(".")
        monkeypatch.setattr(getattr(core, owner), method, calls.taking(name, answer=answer))
    devices: list[object] = []
    monkeypatch.setattr(paddle.device.cuda, "device_count", lambda: 1)
    bind_device = inspect.signature(paddle.set_device).bind
    monkeypatch.setattr(
        paddle, "set_device", lambda *a, **n: devices.append(bind_device(*a, **n).arguments["device"])
    )
    server = RendezvousStore()
    try:
        store = core.TCPStore("127.0.0.1", server.start(), False, 0, 20)
        chosen = prepare_backend()
        group = make_nccl_group(store, rank=1, world=2, generation=3)
    finally:
        server.close()
    assert (chosen.name, devices) == ("nccl", ["gpu:0"])
    assert group is nccl
    form = protocol.Form(generation=3, rank=1, world=2, store_host="", store_port=0, source=0, checkpoint="")
    used = Group(form, backend=chosen, store=None, process_group=group, side_group=None)
    used.sum(paddle.zeros([3]))
    used.broadcast(paddle.zeros([3]), 0)
    names = [name for name, _ in calls.made]
    first = ["CommContextManager.set_device_id", "ProcessGroupNCCL.create"]
    both = ["ProcessGroup.all_reduce", "task.wait"]
    assert names == [*first, *both, *both, "ProcessGroup.broadcast", "task.wait"]
    made = calls.made[1][1]
    assert (made["rank"], made["world_size"], made["group_id"]) == (1, 2, NCCL_GROUP_ID_FIRST + 3)
    assert calls.made[-2][1]["src"] == 0


ON_THE_WHEEL = """
import sys
from paddle.base import core
from services.execution.membership.rendezvous import RendezvousStore
from tidewright.elastic import backend
server = RendezvousStore()
store = core.TCPStore("127.0.0.1", server.start(), False, 0, 20)
place = dict(rank=0, world=2, generation=3)
def kind(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__} {str(error).lower()}"
    return "nothing"
print("DEVICE", "cuda" in kind(lambda: core.CommContextManager.set_device_id(0)))
print("NCCL", kind(lambda: backend.make_nccl_group(store, **place)).count("cuda") > 0)
print("WRONG", kind(lambda: backend.make_nccl_group(store, **place | {"rank": "0"})).startswith("TypeError"))
from paddle.distributed import collective
group = collective._new_process_group_impl("nccl", store, 0, 2, "tide-4", None, group_id=4)
tensor = backend.paddle.zeros([1])
print("SUM", kind(lambda: group.all_reduce(tensor, core.ReduceOp.SUM, True)).count("cuda") > 0)
print("SEND", kind(lambda: group.broadcast(tensor, 0, True)).count("cuda") > 0)
print("WRONG", kind(lambda: group.broadcast(tensor, "0", True)).startswith("TypeError"))
"""


def test_the_wheel_itself_takes_the_calls_up_to_the_driver() -> None:
    """Without a device the group is made, and its collectives are refused by CUDA, not by the binding."""
    the_wheel("ProcessGroupNCCL")
    if paddle.device.cuda.device_count():
        pytest.skip("there is a GPU: the calls would be carried out")
    command = [sys.executable, "-W", "ignore", "-c", ON_THE_WHEEL]
    environment = {**os.environ, "PADDLE_TRAINER_ID": "0", "PYTHONPATH": str(SOURCE.parent.parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    asked = ("DEVICE", "NCCL", "WRONG", "SUM", "SEND", "WRONG")
    assert done.stdout.splitlines() == [f"{what} True" for what in asked]
