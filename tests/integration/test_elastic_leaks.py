"""What a worker loses with each generation that it has been in: Paddle's own part, and nothing of ours."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.elastic_bed import ZygoteBed, wait_until
from tests.integration.elastic_coordinator import ElasticBed


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[ElasticBed]:
    (tmp_path / "zygote").mkdir()
    (tmp_path / "job").mkdir()
    zygote = ZygoteBed(tmp_path / "zygote")
    zygote.start()
    bed = ElasticBed.make(zygote, tmp_path / "job")
    yield bed
    bed.close()
    zygote.stop()


def test_a_generation_costs_one_descriptor_and_one_thread(bed: ElasticBed) -> None:
    c, members = bed.coordinator, ["a", "b"]
    bed.start(*members, epochs=20_000, delay=0.005)
    c.resize(members, source=-1)
    pid = bed.members["a"].worker_pid
    seen: list[tuple[int, int]] = []
    for number in range(5):
        newcomer = f"n{number}"
        bed.start(newcomer, epochs=20_000, delay=0.005)
        c.resize([*members, newcomer])
        c.resize(members, leavers=[newcomer])
        bed.finish_quietly(newcomer)
        seen.append(settled(pid))
    generations = 2 * (len(seen) - 1)

    def grown() -> tuple[int, int]:
        last = settled(pid)
        return last[0] - seen[0][0], last[1] - seen[0][1]

    wait_until(lambda: max(grown()) <= generations, 20, f"at most one of each for a generation: {seen}")


def settled(pid: int) -> tuple[int, int]:
    """Descriptors and threads, once two looks in a row agree: a former group's threads take a moment to end."""
    looks = [(-1, -1)]

    def look() -> bool:
        looks.append((entries(f"/proc/{pid}/fd"), entries(f"/proc/{pid}/task")))
        return looks[-1] == looks[-2]

    wait_until(look, 10, "two looks that agree")
    return looks[-1]


def entries(folder: str) -> int:
    return sum(1 for _ in Path(folder).iterdir())
