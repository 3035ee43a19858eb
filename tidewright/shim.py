"""The parent of one worker: keeps its exit status, watches it, and ends the whole tree below it.

Run as ``python -S -E -I -B shim.py DIRECTORY WORKER_PID INTERVAL_SECONDS MEMORY_BYTES`` by a process that has forked
the worker, written ``pid.json`` and made itself subreaper and session leader; ``exec`` keeps all of that. A standby's
is run as ``shim.py --standby READING WRITING WORKER_PID INTERVAL_SECONDS``, hears the rest when its worker becomes a
member, and writes the record itself. It imports nothing that is not frozen or built in (but ``resource``, for
``wait4``), since one of it runs beside every worker (5 MB, 20 ms).

In DIRECTORY it writes ``watch`` (64 bytes, rewritten in place every interval: wall time, state letter, CPU ticks
of the worker), ``exit.json`` once the worker has ended, ``gone`` when nothing of its tree is left. SIGTERM, SIGINT
and SIGHUP are passed on to the worker. It outlives the services; nobody needs to talk to it.

A tree that uses more than MEMORY_BYTES (0: as much as there is) is ended. The status says so, and also if the kernel
has killed something for want of memory at the moment of a SIGKILL: it counts that in the worker's memory cgroup
(``memory.events`` in v2, ``memory.oom_control`` in v1), or else for the whole machine (``/proc/vmstat``).
"""

import os
import signal
import sys
import time

STANDBY = "--standby"
WATCH_BYTES = 64
WRITE_AGAIN_SECONDS = 0.5
WRITE_GIVE_UP_SECONDS = 60.0
"""How long a full disk may keep the exit status from being written before it is given up as unknown."""
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MEMORY_SECONDS = 0.25
"""How often a tree that has a limit is measured."""
KILL_SECONDS = 10.0
"""How long a killed process may take to give its memory back: so long a count that rose may be about it."""
UNLIMITED_BYTES = 1 << 60
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def write_atomically(directory: str, name: str, text: str, *, synced: bool = True) -> None:
    """Whole or not at all, and (``synced``) on the disk: a reader never sees a part. Raises OSError."""
    temporary = f"{directory}/.{name}.{os.getpid()}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(descriptor, text.encode())
        if synced:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.rename(temporary, f"{directory}/{name}")  # noqa: PTH104 - pathlib costs more than all the rest


def process_stat(pid: int) -> "tuple[str, int, int] | None":
    """State letter, CPU ticks used, start time in ticks since boot; None if there is no such process."""
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    except OSError:
        return None
    try:
        text = os.read(descriptor, 4096).decode("utf-8", "replace")
    except OSError:
        return None
    finally:
        os.close(descriptor)
    fields = text[text.rindex(")") + 2 :].split()  # the command's name may hold blanks and brackets
    return fields[0], int(fields[11]) + int(fields[12]), int(fields[19])


def children_of(pid: int) -> "list[int]":
    """Direct children of a process with one thread, ended ones included."""
    try:
        descriptor = os.open(f"/proc/{pid}/task/{pid}/children", os.O_RDONLY)
    except OSError:
        return []
    try:
        text = b""
        while chunk := os.read(descriptor, 65_536):
            text += chunk
    finally:
        os.close(descriptor)
    return [int(word) for word in text.split()]


def read_text(path: str) -> str:
    """All of a small file of the kernel's; empty if it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return ""
    try:
        text = b""
        while chunk := os.read(descriptor, 65_536):
            text += chunk
    except OSError:  # the process is gone meanwhile
        return ""
    finally:
        os.close(descriptor)
    return text.decode("utf-8", "replace")


# -- memory ----------------------------------------------------------------------------------------------------------


def tree_of(pid: int) -> "list[int]":
    """The process and all below it."""
    found, queue = [pid], [pid]
    while queue:
        parent = queue.pop()
        try:
            tasks = os.listdir(f"/proc/{parent}/task")  # noqa: PTH208
        except OSError:
            continue
        for task in tasks:
            children = [int(word) for word in read_text(f"/proc/{parent}/task/{task}/children").split()]
            found += children
            queue += children
    return found


def resident_bytes(pids: "list[int]") -> int:
    """What they have in memory; pages that they share count for each."""
    words = [read_text(f"/proc/{pid}/statm").split() for pid in pids]
    return sum(int(fields[1]) for fields in words if fields) * PAGE_BYTES


def used_bytes(pids: "list[int]") -> int:
    """What they have in memory; of pages shared with others (the zygote) their part. Costs milliseconds."""
    kilobytes = 0
    for pid in pids:
        for line in read_text(f"/proc/{pid}/smaps_rollup").splitlines():
            if line.startswith("Pss:"):
                kilobytes += int(line.split()[1])
    return kilobytes * 1024


def memory_cgroup(pid: int) -> "tuple[str, str, str]":
    """(mount point, folder, file that counts kills) of the memory cgroup that a process is in; empty if none shows.

    The root of all has no such file, nor has a hierarchy without the memory controller.
    """
    paths = {}
    for line in read_text(f"/proc/{pid}/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        paths[controllers] = path
    own = next((paths[names] for names in paths if "memory" in names.split(",")), None)
    for line in read_text("/proc/self/mountinfo").splitlines():
        fields, _, rest = line.partition(" - ")
        root, mount = fields.split()[3:5]
        kind, _, options = rest.split(" ", 2)
        if kind == "cgroup" and own is not None and "memory" in options.split(","):
            path, counter = own, "memory.oom_control"
        elif kind == "cgroup2" and own is None and "" in paths:
            path, counter = paths[""], "memory.events"
        else:
            continue
        inside = path[len(root) :] if root != "/" and path.startswith(root) else path
        folder = mount + inside.rstrip("/")
        if read_text(f"{folder}/{counter}"):
            return mount, folder, f"{folder}/{counter}"
    return "", "", ""


def kill_count(path: str) -> int:
    """How many processes the kernel has killed there for want of memory."""
    for line in read_text(path).splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return 0


def cgroup_limit(mount: str, folder: str) -> int:
    """The lowest limit from the folder up to where the hierarchy is mounted, in bytes; 0 if there is none."""
    lowest = UNLIMITED_BYTES
    while len(folder) >= len(mount) > 0:
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = read_text(f"{folder}/{name}").strip()
            if text.isdigit():
                lowest = min(lowest, int(text))
        folder = folder.rpartition("/")[0]
    return lowest if lowest < UNLIMITED_BYTES else 0


def exit_record(
    worker: int, status: int, at: float, *, used: int = 0, out_of_memory: str = "", limit: int = 0
) -> str:
    """The text of ``exit.json``; ``code`` is negative for a signal. ``out_of_memory``: who says so (seen.py)."""
    dumped = "true" if os.WCOREDUMP(status) else "false"
    code = os.waitstatus_to_exitcode(status)
    more = f',"used_bytes":{used}' if used else ""
    if out_of_memory:
        more += f',"out_of_memory":"{out_of_memory}","limit_bytes":{limit}'
    return f'{{"pid":{worker},"code":{code},"core_dumped":{dumped},"at":{at:.6f}{more}}}'


class Memory:
    """Watches what a worker's tree uses, and what the kernel does about it."""

    def __init__(self, worker: int, limit: int) -> None:
        self.worker = worker
        self.limit = limit
        self.mount, self.folder, self.counter = memory_cgroup(worker)
        self.counter = self.counter or "/proc/vmstat"
        self.kills = kill_count(self.counter)
        self.rose_at = -KILL_SECONDS
        self.most = 0
        self.is_over = False

    def look(self) -> None:
        """Once an interval, and at the end: when did the kernel's count rise last?"""
        kills = kill_count(self.counter)
        if kills > self.kills:
            self.kills, self.rose_at = kills, time.monotonic()

    def measure(self) -> bool:
        """True if the tree uses more than its limit. Exact, and slower, only where it may be."""
        pids = tree_of(self.worker)
        used = resident_bytes(pids)
        if used > self.limit:
            used = used_bytes(pids) or used
        self.most = max(self.most, used)
        self.is_over = self.is_over or used > self.limit
        return self.is_over

    def end_record(self, worker: int, status: int, at: float, resident: int) -> str:
        """``resident``: the most that the worker itself had in memory, as the kernel saw it."""
        was_killed = os.waitstatus_to_exitcode(status) in (-signal.SIGKILL, 128 + signal.SIGKILL)
        if self.is_over:
            return exit_record(worker, status, at, used=self.most, out_of_memory="limit", limit=self.limit)
        used = max(self.most, resident)
        self.look()
        if was_killed and time.monotonic() - self.rose_at < KILL_SECONDS:
            limit = cgroup_limit(self.mount, self.folder)
            return exit_record(worker, status, at, used=used, out_of_memory="kernel", limit=limit)
        return exit_record(worker, status, at, used=used)


class Shim:
    """Waits for the worker, then for the end of its tree."""

    def __init__(self, directory: str, worker: int, interval: float, memory_bytes: int) -> None:
        self.directory = directory
        self.worker = worker
        self.interval = interval
        self.memory = Memory(worker, memory_bytes)
        self.status: int | None = None
        self.record = ""
        self.written = False
        self.watch = -1

    def run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD, *PASSED_ON))
        next_watch = next_measure = time.monotonic()
        while self.status is None:
            self.reap()
            if self.status is not None:
                break
            now = time.monotonic()
            if now >= next_watch:
                self.record_watch()
                self.memory.look()
                next_watch = now + self.interval
            if self.memory.limit and now >= next_measure:
                self.end_above_memory()
                next_measure = now + MEMORY_SECONDS
            next_look = min(next_watch, next_measure) if self.memory.limit else next_watch
            self.wait(max(0.0, next_look - now))
        self.end_tree()
        self.finish()

    def reap(self) -> None:
        """Take every status there is; keep the worker's and write it at once."""
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                if self.status is None:  # not our child: whoever started us is wrong; there is nothing to wait for
                    self.status = -1
                return
            if pid == 0:
                return
            if pid == self.worker:
                self.status = status
                self.record = self.memory.end_record(pid, status, time.time(), used.ru_maxrss * 1024)
                self.write_exit()

    def wait(self, seconds: float) -> None:
        got = signal.sigtimedwait((signal.SIGCHLD, *PASSED_ON), seconds)
        if got is not None and got.si_signo in PASSED_ON:
            try:
                os.kill(self.worker, got.si_signo)
            except ProcessLookupError:
                return

    def end_above_memory(self) -> None:
        """The worker alone: what is below it goes with it, as always."""
        if self.memory.measure():
            try:
                os.kill(self.worker, signal.SIGKILL)
            except ProcessLookupError:
                return

    def end_tree(self) -> None:
        """Kill and reap until nothing is left. Being subreaper, all orphans below become children sooner or later."""
        while children := children_of(os.getpid()):
            for child in children:
                try:
                    os.kill(child, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            signal.sigtimedwait((signal.SIGCHLD,), 0.01)
            self.reap()

    def write_exit(self) -> bool:
        """Write the exit status; False if it could not be written now (a full disk)."""
        if self.written or self.status is None or self.status < 0:
            return True
        self.written = self.try_to_write("exit.json", self.record)
        return self.written

    def try_to_write(self, name: str, text: str, *, synced: bool = True) -> bool:
        try:
            write_atomically(self.directory, name, text, synced=synced)
        except FileNotFoundError:  # the folder was removed: nobody is left who wants to know
            return True
        except OSError:
            return False
        return True

    def finish(self) -> None:
        """A full disk is waited for, with a limit: an unknown status is better than a shim that never ends."""
        give_up = time.monotonic() + WRITE_GIVE_UP_SECONDS
        # Nobody needs ``gone`` after a reboot: nothing of the tree can be left then.
        while not (self.write_exit() and self.try_to_write("gone", f"{time.time():.6f}", synced=False)):
            if time.monotonic() > give_up:
                return
            time.sleep(WRITE_AGAIN_SECONDS)

    def record_watch(self) -> None:
        stat = process_stat(self.worker)
        if stat is None:
            return
        line = f"{time.time():.3f} {stat[0]} {stat[1]}".ljust(WATCH_BYTES - 1) + "\n"
        try:
            if self.watch < 0:
                self.watch = os.open(f"{self.directory}/watch", os.O_WRONLY | os.O_CREAT, 0o600)
            os.pwrite(self.watch, line.encode(), 0)
        except OSError:  # a full disk: the record grows old, and that is what it says
            return


def become_member(reading: int, writing: int) -> "tuple[str, int] | None":
    """As a standby's shim: the folder of the member that it becomes and its limit of memory in bytes.

    ``reading`` yields them and the text of ``pid.json``, which is on the disk when this returns; ``writing`` takes
    the worker's permission to go on. None: the zygote is gone, or the record could not be written; the worker has
    run nothing then.
    """
    message = b""
    try:
        while chunk := os.read(reading, 65_536):
            message += chunk
    except OSError:  # the zygote has died
        return None
    os.close(reading)
    if not message.endswith(b"\n"):
        return None
    folder, memory_bytes, record = message[:-1].split(b"\0")
    directory = os.fsdecode(folder)
    try:
        write_atomically(directory, "pid.json", record.decode())
    except OSError as error:
        tell_start_error(directory, error)
        return None
    try:
        os.write(writing, b"g")
    except OSError:  # it was killed: its status will tell
        return directory, int(memory_bytes)
    os.close(writing)
    return directory, int(memory_bytes)


def tell_start_error(directory: str, error: OSError) -> None:
    """So that nobody waits for a record that never comes."""
    try:
        write_atomically(directory, "start_error", f"{error!r}\n")
    except OSError:
        return


def main(arguments: "list[str]") -> None:
    try:
        with open("/proc/self/comm", "w") as name:
            name.write("tide-shim")
    except OSError:
        pass
    if arguments[0] == STANDBY:
        reading, writing, worker = (int(argument) for argument in arguments[1:4])
        found = become_member(reading, writing)
        if found is None:
            os.kill(worker, signal.SIGKILL)
            os._exit(99)
        Shim(found[0], worker, float(arguments[4]), found[1]).run()
    else:
        directory, pid, interval, memory_bytes = arguments
        Shim(directory, int(pid), float(interval), int(memory_bytes)).run()


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)
