"""Losing workers, the control plane, newcomers and checkpoints, on real processes."""

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.integration.elastic_bed import ZygoteBed, is_alive, wait_until
from tests.integration.elastic_coordinator import ElasticBed, largest_difference
from tidewright import protocol


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZygoteBed]:
    bed = ZygoteBed(tmp_path_factory.mktemp("faults"))
    bed.start()
    yield bed
    bed.stop()


@pytest.fixture
def bed(zygote: ZygoteBed, tmp_path: Path) -> Iterator[ElasticBed]:
    bed = ElasticBed.make(zygote, tmp_path, checkpoint_every_steps=20)
    yield bed
    bed.close()


def kill(bed: ElasticBed, name: str, number: int = signal.SIGKILL) -> None:
    os.kill(bed.members[name].worker_pid, number)


def mend(bed: ElasticBed, names: list[str]) -> int:
    """What execution does with a cut group: offer again, from the most advanced."""
    bed.coordinator.waiting(names)
    return bed.coordinator.resize(names, source=bed.coordinator.most_advanced(names))


def check(bed: ElasticBed, *, epochs: int) -> None:
    bed.applied_once(samples=97, steps_per_epoch=7, total_steps=7 * epochs)
    alone = bed.alone(epochs=epochs)
    results = bed.results()
    assert results
    assert all(largest_difference(result, alone) < 1e-12 for result in results)


def test_rank_0_is_killed_and_the_rest_go_on(bed: ElasticBed) -> None:
    c = bed.coordinator
    bed.start("a", "b", "c", epochs=25)
    c.resize(["a", "b", "c"], source=-1)
    killed_at = time.monotonic()
    kill(bed, "a")
    c.waiting(["b", "c"])
    assert time.monotonic() - killed_at < 5, "gloo's own 30 s were waited for"
    mend(bed, ["b", "c"])
    bed.finish("b", "c")
    check(bed, epochs=25)


def test_training_goes_on_while_the_control_plane_is_down(bed: ElasticBed) -> None:
    c = bed.coordinator
    bed.start("a", "b", epochs=50)
    c.resize(["a", "b"], source=-1)
    c.down()
    before = len([e for e in bed.entries() if e["k"] == "applied"])
    time.sleep(1.0)
    entries = [e for e in bed.entries() if e["k"] == "applied"]
    assert len(entries) > before + 20
    gaps = [later["t"] - earlier["t"] for earlier, later in pairwise(entries)]
    assert max(gaps) < 0.5
    c.up()
    wait_until(lambda: c.peers["a"].hello.step > 20 and c.peers["b"].hello.step > 20)
    assert c.peers["a"].hello.generation == 1
    assert not c.peers["a"].hello.waiting
    bed.finish("a", "b")
    check(bed, epochs=50)


def test_a_worker_dies_in_the_outage_and_the_survivors_hold_their_state(bed: ElasticBed) -> None:
    c = bed.coordinator
    bed.start("a", "b", "c", epochs=25)
    c.resize(["a", "b", "c"], source=-1)
    c.down()
    kill(bed, "b")
    wait_until(lambda: bed.kinds("a")[-1] == bed.kinds("c")[-1] == "waiting", 5)
    c.up()
    mend(bed, ["a", "c"])
    bed.finish("a", "c")
    check(bed, epochs=25)


@pytest.mark.parametrize("moment", ["forming", "formed", "swapped"])
def test_a_newcomer_is_killed_and_the_old_group_goes_on(bed: ElasticBed, moment: str) -> None:
    """No step is lost: the survivors fall back at the step where they are."""
    c = bed.coordinator
    bed.start("a", "b", epochs=25)
    c.resize(["a", "b"], source=-1)
    bed.start("n", epochs=25, delay=1.0 if moment == "swapped" else 0.01)
    if moment == "forming":
        kill(bed, "n", signal.SIGSTOP)
    number = c.offer(["a", "b", "n"])
    if moment == "forming":
        time.sleep(0.2)
        c.tell("a", protocol.Abort(generation=number))
        c.tell("b", protocol.Abort(generation=number))
    elif moment == "formed":
        wait_until(lambda: c.peers["n"].said(protocol.Formed, number))
    else:
        # the newcomer sleeps for two seconds after its first step: everyone has swapped, nobody passes the second
        wait_until(lambda: "applied" in bed.kinds("n"))
    kill(bed, "n")
    bed.finish("a", "b")
    assert "waiting" not in bed.kinds("a") + bed.kinds("b")
    if moment == "swapped":
        assert c.peers["a"].said(protocol.FellBack) == protocol.FellBack(generation=1, failed=number)
        assert c.peers["b"].said(protocol.FellBack)
        steps = {e["step"] for e in bed.entries() if e["k"] == "fell_back"}
        assert len(steps) == 1
        # the step that all had applied together in the new generation stays applied, and is not done again
        assert [e["generation"] for e in bed.entries() if e["k"] == "applied" and e["step"] == min(steps) - 1] == [
            2
        ] * 3
    check(bed, epochs=25)


def test_an_offer_of_before_the_cut_is_not_used(bed: ElasticBed) -> None:
    """It may leave out the very member that is a step ahead."""
    c, survivors = bed.coordinator, ["a", "b"]
    bed.start("a", "b", "c", epochs=25)
    c.resize(["a", "b", "c"], source=-1)
    wait_until(lambda: c.step("a") > 5)
    kill(bed, "c", signal.SIGSTOP)  # nobody comes to the step at which all would change
    number = c.offer(["a"], leavers=["b", "c"])
    wait_until(lambda: c.peers["a"].said(protocol.Formed, number))
    kill(bed, "c")
    c.waiting(survivors)
    wait_until(lambda: c.peers["a"].said(protocol.FormFailed, number))
    assert not c.peers["a"].said(protocol.Started, number)
    mend(bed, survivors)
    bed.finish(*survivors)
    check(bed, epochs=25)


def test_a_leaver_comes_back_when_the_new_group_fails(bed: ElasticBed) -> None:
    """b leaves for n; n dies before the second all-reduce; a and b go on together."""
    c = bed.coordinator
    bed.start("a", "b", epochs=25)
    c.resize(["a", "b"], source=-1)
    bed.start("n", epochs=25, delay=1.0)
    c.offer(["a", "n"], leavers=["b"])
    wait_until(lambda: "applied" in bed.kinds("n"))
    kill(bed, "n")
    bed.finish("a", "b")
    assert "fell_back" in bed.kinds("a")
    assert "fell_back" in bed.kinds("b")
    assert "left" not in bed.kinds("b")
    check(bed, epochs=25)


def test_a_single_worker_falls_back_to_itself(bed: ElasticBed) -> None:
    c = bed.coordinator
    bed.start("a", epochs=25)
    c.resize(["a"], source=-1)
    bed.start("n", epochs=25, delay=1.0)
    c.offer(["a", "n"])
    wait_until(lambda: "applied" in bed.kinds("n"))
    kill(bed, "n")
    bed.finish("a")
    assert "fell_back" in bed.kinds("a")
    check(bed, epochs=25)


def test_the_only_holder_dies_in_the_swap_and_the_newcomer_has_the_state(bed: ElasticBed) -> None:
    c = bed.coordinator
    bed.start("a", epochs=25)
    c.resize(["a"], source=-1)
    bed.start("n", epochs=25)
    c.resize(["a", "n"])
    kill(bed, "a")
    mend(bed, ["n"])
    bed.finish("n")
    check(bed, epochs=25)


def test_shrinking_to_one_leaves_a_checkpoint(bed: ElasticBed) -> None:
    c = bed.coordinator
    bed.start("a", "b", epochs=50)
    c.resize(["a", "b"], source=-1)
    number = c.resize(["a"], leavers=["b"])
    bed.finish("b")
    left_at = bed.members["b"].ledger()[-1]
    assert left_at["k"] == "left"
    folders = [path.name for path in (bed.base / "checkpoints").glob("g*")]
    assert any(int(name.partition("-s")[2]) >= left_at["step"] for name in folders), (number, left_at, folders)
    kill(bed, "a")
    bed.members["a"].gone()
    bed.start("x", epochs=50)
    newest = max((bed.base / "checkpoints").glob("g*"), key=lambda path: int(path.name.partition("-s")[2]))
    c.resize(["x"], source=-1, checkpoint=str(newest))
    bed.finish("x")
    alone = bed.alone(epochs=50)
    assert largest_difference(bed.results()[0], alone) < 1e-12


def test_a_truncated_checkpoint_is_skipped(bed: ElasticBed) -> None:
    c = bed.coordinator
    bed.start("a", "b", epochs=25)
    c.resize(["a", "b"], source=-1)
    folder = bed.base / "checkpoints"
    wait_until((folder / "g1-s40" / "manifest.json").exists)
    for name in "ab":
        kill(bed, name)
        bed.members[name].gone()
    whole = sorted(folder.glob("g*"), key=lambda path: int(path.name[4:]))
    assert len(whole) >= 2
    manifest = json.loads((whole[-1] / "manifest.json").read_text())
    assert (manifest["generation"], manifest["step"]) == (1, int(whole[-1].name[4:]))
    damaged = whole[-1] / "tensors.npz"
    damaged.write_bytes(damaged.read_bytes()[:-7])
    bed.start("x", epochs=25)
    older = tuple(path.name for path in reversed(whole[:-1]))
    c.resize(["x"], source=-1, checkpoint=str(whole[-1]), older=older)
    started = c.peers["x"].said(protocol.Started)
    assert started.resumed_step == int(whole[-2].name[4:])
    assert started.skipped == (f"{whole[-1].name}: tensors.npz is not what was written",)
    assert "checkpoint_skipped" in bed.kinds("x")
    bed.finish("x")
    assert largest_difference(bed.results()[0], bed.alone(epochs=25)) < 1e-12


def test_a_job_with_steps_never_begins_anew(bed: ElasticBed) -> None:
    """Nor does it end by itself: it says that the state is lost, and waits for what execution makes of it."""
    c = bed.coordinator
    bed.start("x", epochs=2)
    (bed.base / "checkpoints" / "g3-s40").mkdir()
    lost = c.offer(["x"], source=-1, checkpoint=str(bed.base / "checkpoints" / "g3-s40"))
    word = wait_until(lambda: c.peers["x"].said(protocol.FormFailed, lost))
    assert word.state_lost
    assert "g3-s40: manifest.json: No such file or directory" in word.reason
    assert "begun" not in bed.kinds("x")
    c.resize(["x"], source=-1, checkpoint=str(bed.base / "checkpoints" / "g3-s40"), may_begin_anew=True)
    started = c.peers["x"].said(protocol.Started)
    assert (started.resumed_generation, started.resumed_step, len(started.skipped)) == (0, 0, 1)
    bed.finish("x")
    assert largest_difference(bed.results()[0], bed.alone(epochs=2)) < 1e-12


def test_a_waiting_member_keeps_its_state_when_it_is_stopped(bed: ElasticBed) -> None:
    c = bed.coordinator
    bed.start("a", "b", epochs=50)
    c.resize(["a", "b"], source=-1)
    kill(bed, "b")
    c.waiting(["a"])
    step = c.step("a")
    c.tell("a", protocol.Stop(grace_seconds=5, reason="evicted"))
    bed.finish("a")
    assert (bed.base / "checkpoints" / f"g1-s{step}" / "manifest.json").exists()


def test_sigterm_is_a_stop(bed: ElasticBed) -> None:
    c = bed.coordinator
    bed.start("a", "b", epochs=50)
    c.resize(["a", "b"], source=-1)
    kill(bed, "b", signal.SIGTERM)
    bed.finish("a", "b")
    assert len(list((bed.base / "checkpoints").glob("g1-s*"))) >= 1


def test_a_disk_that_takes_no_checkpoint_stops_no_training(bed: ElasticBed) -> None:
    c = bed.coordinator
    (bed.base / "checkpoints").rmdir()
    (bed.base / "checkpoints").write_text("no folder can be made here")
    bed.start("a", "b", epochs=20)
    c.resize(["a", "b"], source=-1)
    bed.finish("a", "b")
    assert c.peers["a"].said(protocol.CheckpointFailed)
    assert "checkpoint_failed" in bed.kinds("a")
    check(bed, epochs=20)


def test_who_is_refused_after_its_hello_ends_at_once(bed: ElasticBed) -> None:
    c = bed.coordinator
    bed.start("a", epochs=50)
    c.resize(["a"], source=-1)
    c.tell("a", protocol.Refused(reason="another process has this name"))
    assert bed.members["a"].exit()["code"] == 97
    assert "refused: another process has this name" in bed.members["a"].log


def test_a_stopped_peer_is_waited_for_and_its_return_costs_nobody(bed: ElasticBed) -> None:
    c = bed.coordinator
    bed.start("a", "b", epochs=25)
    c.resize(["a", "b"], source=-1)
    kill(bed, "b", signal.SIGSTOP)
    wait_until(lambda: c.peers["a"].mark is not None and c.peers["a"].mark.sync_seconds > 1, 5)
    assert not c.is_waiting("a")
    kill(bed, "b", signal.SIGCONT)
    bed.finish("a", "b")
    check(bed, epochs=25)


def test_a_socket_of_the_scripts_own_is_no_group_socket(bed: ElasticBed) -> None:
    """It is opened while the group forms, and closed by its peer in the middle of training."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        text = bed.script.read_text().replace(
            "with elastic.join() as job:",
            f"""import socket, threading
def opened():
    while True:
        kept.append(socket.create_connection(("127.0.0.1", {server.getsockname()[1]})))
        time.sleep(0.002)
kept = []
threading.Thread(target=opened, daemon=True).start()
with elastic.join() as job:""",
        )
        bed.script.write_text(text)
        c = bed.coordinator
        bed.start("a", "b", epochs=20)
        number = c.offer(["a", "b"], source=-1)
        accepted = []
        server.settimeout(0.05)
        while not c.peers["b"].said(protocol.Started, number):
            try:
                accepted.append(server.accept()[0])
            except TimeoutError:
                continue
        for one in accepted:
            one.close()
    bed.finish("a", "b")
    assert len(accepted) > 3
    assert "waiting" not in bed.kinds("a") + bed.kinds("b")


def test_the_wrong_script_is_told_what_is_wrong(bed: ElasticBed) -> None:
    c = bed.coordinator
    bed.start("a", epochs=50)
    c.resize(["a"], source=-1)
    bed.start("n", epochs=51)
    c.offer(["a", "n"])
    assert bed.members["n"].exit()["code"] == 1
    assert "every process must count the same steps" in bed.members["n"].log
    assert is_alive(bed.members["a"].worker_pid)
    c.tell("a", protocol.Stop(grace_seconds=5, reason="enough"))
    bed.finish("a")
