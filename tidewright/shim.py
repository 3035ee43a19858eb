"""The parent of one worker: keeps its exit status, watches it, and ends the whole tree below it.

Run as ``python -S -E -I -B shim.py DIRECTORY WORKER_PID INTERVAL_SECONDS`` by a process that has forked the worker,
written ``pid.json`` and made itself subreaper and session leader; ``exec`` keeps all of that. It imports nothing
that is not frozen or built in, since one of it runs beside every worker (4 MB, 20 ms).

In DIRECTORY it writes ``watch`` (64 bytes, rewritten in place every interval: wall time, state letter, CPU ticks
of the worker), ``exit.json`` once the worker has ended, ``gone`` when nothing of its tree is left. SIGTERM, SIGINT
and SIGHUP are passed on to the worker. It outlives the services; nobody needs to talk to it.
"""

import os
import signal
import sys
import time

WATCH_BYTES = 64
WRITE_AGAIN_SECONDS = 0.5
WRITE_GIVE_UP_SECONDS = 60.0
"""How long a full disk may keep the exit status from being written before it is given up as unknown."""
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def write_atomically(directory: str, name: str, text: str) -> None:
    """Whole or not at all, and on the disk: a reader never sees a part. Raises OSError."""
    temporary = f"{directory}/.{name}.{os.getpid()}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(descriptor, text.encode())
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


def exit_record(worker: int, status: int, at: float) -> str:
    """The text of ``exit.json``; ``code`` is negative for a signal."""
    dumped = "true" if os.WCOREDUMP(status) else "false"
    code = os.waitstatus_to_exitcode(status)
    return f'{{"pid":{worker},"code":{code},"core_dumped":{dumped},"at":{at:.6f}}}'


class Shim:
    """Waits for the worker, then for the end of its tree."""

    def __init__(self, directory: str, worker: int, interval: float) -> None:
        self.directory = directory
        self.worker = worker
        self.interval = interval
        self.status: int | None = None
        self.ended_at = 0.0
        self.written = False
        self.watch = -1

    def run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD, *PASSED_ON))
        next_watch = time.monotonic()
        while self.status is None:
            self.reap()
            if self.status is not None:
                break
            now = time.monotonic()
            if now >= next_watch:
                self.record_watch()
                next_watch = now + self.interval
            self.wait(max(0.0, next_watch - now))
        self.end_tree()
        self.finish()

    def reap(self) -> None:
        """Take every status there is; keep the worker's and write it at once."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                if self.status is None:  # not our child: whoever started us is wrong; there is nothing to wait for
                    self.status = -1
                return
            if pid == 0:
                return
            if pid == self.worker:
                self.status = status
                self.ended_at = time.time()
                self.write_exit()

    def wait(self, seconds: float) -> None:
        got = signal.sigtimedwait((signal.SIGCHLD, *PASSED_ON), seconds)
        if got is not None and got.si_signo in PASSED_ON:
            try:
                os.kill(self.worker, got.si_signo)
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
        self.written = self.try_to_write("exit.json", exit_record(self.worker, self.status, self.ended_at))
        return self.written

    def try_to_write(self, name: str, text: str) -> bool:
        try:
            write_atomically(self.directory, name, text)
        except FileNotFoundError:  # the folder was removed: nobody is left who wants to know
            return True
        except OSError:
            return False
        return True

    def finish(self) -> None:
        """A full disk is waited for, with a limit: an unknown status is better than a shim that never ends."""
        give_up = time.monotonic() + WRITE_GIVE_UP_SECONDS
        while not (self.write_exit() and self.try_to_write("gone", f"{time.time():.6f}")):
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


def main(arguments: "list[str]") -> None:
    directory, worker, interval = arguments
    try:
        with open("/proc/self/comm", "w") as name:
            name.write("tide-shim")
    except OSError:
        pass
    Shim(directory, int(worker), float(interval)).run()


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)
