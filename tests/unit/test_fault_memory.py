"""Where the kernel counts what it killed for want of memory: found in every layout of cgroups, and read there."""

from pathlib import Path

import pytest

from tidewright import shim

EVENTS = "low 0\nhigh 0\nmax 41\noom 3\noom_kill 2\noom_group_kill 0\n"
"""``memory.events`` of cgroup v2."""
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"
"""``memory.oom_control`` of cgroup v1."""
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "36 29 0:31 {root} /sys/fs/cgroup/memory rw shared:16 - cgroup cgroup rw,memory"
HYBRID = "42 29 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
FOLDER = "/user.slice/run-7.scope"


@pytest.mark.parametrize(
    ("own", "mounts", "files", "found"),
    [
        # v2, as systemd sets it up.
        (
            f"0::{FOLDER}\n",
            [V2],
            {f"/sys/fs/cgroup{FOLDER}/memory.events": EVENTS},
            f"/sys/fs/cgroup{FOLDER}/memory.events",
        ),
        # v2 in a container with a namespace of its own: its root is not the root of all, so it counts.
        ("0::/\n", [V2], {"/sys/fs/cgroup/memory.events": EVENTS}, "/sys/fs/cgroup/memory.events"),
        # v2 at the root of all: nothing is counted there.
        ("0::/\n", [V2], {}, ""),
        # v1, also beside a v2 hierarchy that has no memory.
        (
            f"4:memory:{FOLDER}\n0::/\n",
            [HYBRID, V1.format(root="/")],
            {f"/sys/fs/cgroup/memory{FOLDER}/memory.oom_control": CONTROL},
            f"/sys/fs/cgroup/memory{FOLDER}/memory.oom_control",
        ),
        # v1 in a container: its own folder is mounted as if it were the root.
        (
            "11:cpuset:/docker/abc\n4:memory:/docker/abc\n",
            [V1.format(root="/docker/abc")],
            {"/sys/fs/cgroup/memory/memory.oom_control": CONTROL},
            "/sys/fs/cgroup/memory/memory.oom_control",
        ),
        ("", [], {}, ""),
    ],
)
def test_counter_is_found(
    own: str, mounts: list[str], files: dict[str, str], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"/proc/7/cgroup": own, "/proc/self/mountinfo": "".join(f"{line}\n" for line in mounts), **files}
    monkeypatch.setattr(shim, "read_text", lambda path: known.get(path, ""))
    assert shim.memory_cgroup(7)[2] == found


def test_counter_of_this_very_process_can_be_read() -> None:
    """Whatever this machine is: a cgroup that counts, or the whole machine's count."""
    counter = shim.memory_cgroup(shim.os.getpid())[2] or "/proc/vmstat"
    assert "oom_kill " in Path(counter).read_text()
    assert shim.kill_count(counter) >= 0


@pytest.mark.parametrize(("text", "kills"), [(EVENTS, 2), (CONTROL, 5), ("nr_free 7\noom_kill 11\n", 11), ("", 0)])
def test_kills_are_counted(text: str, kills: int, tmp_path: Path) -> None:
    path = tmp_path / "counter"
    path.write_text(text)
    assert shim.kill_count(str(path)) == kills


def test_lowest_limit_on_the_way_up_holds(tmp_path: Path) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    assert shim.cgroup_limit(str(tmp_path), str(inner)) == 0
    (inner / "memory.max").write_text("max\n")
    (tmp_path / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert shim.cgroup_limit(str(tmp_path), str(inner)) == 0
    (tmp_path / "outer" / "memory.max").write_text("4096000\n")
    assert shim.cgroup_limit(str(tmp_path), str(inner)) == 4096000


def test_memory_of_a_fork_counts_what_is_its_own() -> None:
    own = shim.os.getpid()
    assert own in shim.tree_of(own)
    assert 0 < shim.used_bytes([own]) <= shim.resident_bytes([own])
    assert shim.resident_bytes([2**22 + 1]) == 0
