"""What a forked worker does before, around and after the user's script or command."""

import atexit
import json
import os
import random
import signal
import sys
import threading
import traceback
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from tidewright import kinship, protocol
from tidewright.elastic import warm
from tidewright.elastic.admission import NotAdmitted, wait_for_admission

NO_RECORD_EXIT: Final = 98
"""No record of this process, or no log, could be written: it must not run."""
NOT_ADMITTED_EXIT: Final = 97
CANNOT_EXECUTE_EXIT: Final = 126
NOT_FOUND_EXIT: Final = 127


class BadRequest(ValueError):
    """A start request that cannot be carried out; says which field and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRequest:
    """One worker to start. With ``script`` and no interpreter it is forked, else executed.

    ``memory_bytes``: what it may use with all that it starts; 0: as much as there is.
    """

    directory: str
    member: str
    nonce: str
    environment: Mapping[str, str]
    working_directory: str | None
    script: str | None
    args: tuple[str, ...]
    command: tuple[str, ...] | None
    interpreter: str | None
    memory_bytes: int = 0

    @property
    def is_forked(self) -> bool:
        return self.script is not None and self.interpreter is None


def to_start_request(value: Mapping[str, object]) -> StartRequest:
    """Check the fields of a request. Raises BadRequest."""
    request = StartRequest(
        directory=_text(value, "directory"),
        member=_text(value, "member"),
        nonce=_text(value, "nonce"),
        environment=_environment(value.get("environment", {})),
        working_directory=_text_or_none(value, "working_directory"),
        script=_text_or_none(value, "script"),
        args=_texts(value.get("args") or [], "args"),
        command=_texts(value["command"], "command") if value.get("command") is not None else None,
        interpreter=_text_or_none(value, "interpreter"),
        memory_bytes=_size(value, "memory_bytes"),
    )
    if not Path(request.directory).is_absolute():
        raise BadRequest("directory must be an absolute path")
    if (request.script is None) == (request.command is None):
        raise BadRequest("exactly one of script and command must be given")
    if request.command is not None and not request.command:
        raise BadRequest("command must name a program")
    return request


def _text(value: Mapping[str, object], name: str) -> str:
    text = value.get(name)
    if not isinstance(text, str) or not text or "\0" in text:
        raise BadRequest(f"{name} must be a text that is not empty")
    return text


def _text_or_none(value: Mapping[str, object], name: str) -> str | None:
    return None if value.get(name) is None else _text(value, name)


def _size(value: Mapping[str, object], name: str) -> int:
    size = value.get(name, 0)
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise BadRequest(f"{name} must be a number of bytes")
    return size


def _texts(value: object, name: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) and "\0" not in item for item in value):
        raise BadRequest(f"{name} must be a list of texts")
    return tuple(value)


def _environment(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise BadRequest("environment must be an object of texts")
    for key, text in value.items():
        if not isinstance(text, str) or not key or "=" in key or "\0" in key + text:
            raise BadRequest(f"environment.{key or '(no name)'} must be a variable's name with a text")
    return value


# -- in the forked process ----------------------------------------------------------------------------------------


def run_worker(request: StartRequest, *, record_written: int, base_environment: Mapping[str, str]) -> NoReturn:
    """Be the worker: own session, own log, admission, then the script or command. Never returns.

    ``record_written``: descriptor that yields one byte once the shim's record of this process is on the disk.
    ``base_environment``: what an executed program sees below its own variables.
    """
    try:
        os.setsid()
        _become_member(request, record_written)
        close_descriptors()
        _seed_generators()
        code = _run(request, base_environment)
    except BaseException:  # noqa: BLE001 - a fork must never return into its parent's code
        traceback.print_exc()
        code = 1
    end(code)


def run_standby(requests: int, *, record_written: int, base_environment: Mapping[str, str]) -> NoReturn:
    """Be ready, then the worker of the request that comes over the socket ``requests``. Never returns."""
    try:
        os.setsid()
        close_descriptors(keep=(requests, record_written))
        _seed_generators()
        warm.touch_pages()
        request = _receive_request(requests)
        _become_member(request, record_written)
        close_descriptors()
        code = _run(request, base_environment)
    except BaseException:  # noqa: BLE001 - a fork must never return into its parent's code
        traceback.print_exc()
        code = 1
    end(code)


def _receive_request(requests: int) -> StartRequest:
    """Wait for it; ends this process if the zygote is gone before."""
    text = b""
    while not text.endswith(b"\n"):
        chunk = os.read(requests, 65_536)
        if not chunk:
            os._exit(0)
        text += chunk
    return to_start_request(json.loads(text))


def _become_member(request: StartRequest, record_written: int) -> None:
    """Take the mark and open the log, then go on only once the record of this process is on the disk."""
    kinship.put_mark(kinship.mark_of(request.member, request.nonce))
    try:
        _open_log(f"{request.directory}/log")
    except OSError:  # a full disk is no fault of the script's
        os._exit(NO_RECORD_EXIT)
    if os.read(record_written, 1) != b"g":
        os._exit(NO_RECORD_EXIT)


def _run(request: StartRequest, base_environment: Mapping[str, str]) -> int:
    variables = dict(request.environment)
    variables.setdefault(protocol.MEMBER_VARIABLE, request.member)
    variables.setdefault(protocol.NONCE_VARIABLE, request.nonce)
    variables.setdefault(protocol.MEMBER_DIRECTORY_VARIABLE, request.directory)
    try:
        wait_for_admission(variables, os.getpid())
    except NotAdmitted as refusal:
        _complain(f"not admitted: {refusal}")
        return NOT_ADMITTED_EXIT
    place = request.working_directory or (str(Path(request.script).parent) if request.script else request.directory)
    try:
        os.chdir(place)
    except OSError as error:
        _complain(f"working directory {place}: {error.strerror}")
        return CANNOT_EXECUTE_EXIT
    if request.is_forked:
        assert request.script is not None
        os.environ.update(variables)
        return run_script(request.script, request.args)
    return _execute(request, {"PYTHONUNBUFFERED": "1", **base_environment, **variables})


def _open_log(path: str) -> None:
    """Descriptors 1 and 2 append to the log itself: no pipe that could block, break or lose what was written."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(nothing)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")


def close_descriptors(*, keep: tuple[int, ...] = ()) -> None:
    """Close all but the standard ones: a fork inherits the zygote's sockets in spite of close-on-exec."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        if int(entry.name) > 2 and int(entry.name) not in keep:
            try:
                os.close(int(entry.name))
            except OSError:  # the descriptor of this very listing
                continue


def reset_signals() -> None:
    """A fork inherits dispositions and the mask; a handler of the zygote's has no business in a worker."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as in every interpreter: a lost peer is an error, not an end
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _seed_generators() -> None:
    """Forks of one process share the state of its generators; a fresh interpreter would have its own."""
    random.seed()
    numpy, paddle = sys.modules.get("numpy"), sys.modules.get("paddle")
    if numpy is not None:
        numpy.random.seed()
    if paddle is not None and hasattr(paddle, "seed"):
        paddle.seed(int.from_bytes(os.urandom(7)))
    atexit._clear()  # what modules registered in the zygote is for the zygote's end


def run_script(path: str, args: tuple[str, ...]) -> int:
    """Run a Python file as ``__main__`` and return its exit code by the interpreter's own rules."""
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = module
    sys.argv = [path, *args]
    if sys.flags.safe_path:
        sys.path.insert(0, str(Path(path).parent))
    else:
        sys.path[0] = str(Path(path).parent)
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        _complain(f"cannot open script {path}: {error.strerror}")
        return 2
    try:
        exec(compile(source, path, "exec"), module.__dict__)  # noqa: S102 - running the user's script is what it is for
    except SystemExit as request:
        return _exit_code(request.code)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:  # noqa: BLE001 - as the interpreter does at its top
        _print_traceback(error)
        return 1
    return 0


def _complain(text: object) -> None:
    sys.stderr.write(f"{text}\n")


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    _complain(code)
    return 1


def _print_traceback(error: BaseException) -> None:
    """As the interpreter prints it, without this module's own frame."""
    below = error.__traceback__.tb_next if error.__traceback__ is not None else None
    traceback.print_exception(error.with_traceback(below))


def _execute(request: StartRequest, environment: Mapping[str, str]) -> int:
    if request.command is not None:
        arguments = [*request.command, *request.args]
    else:
        arguments = [request.interpreter or sys.executable, request.script or "", *request.args]
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        os.execvpe(arguments[0], arguments, environment)  # noqa: S606 - the user's command, without a shell
    except OSError as error:
        _complain(f"cannot execute {arguments[0]}: {error.strerror}")
        return NOT_FOUND_EXIT if isinstance(error, FileNotFoundError) else CANNOT_EXECUTE_EXIT


def end(code: int) -> NoReturn:
    """Leave as an interpreter does, threads and exit functions first, but past the destructors of C++ libraries:

    threads of a communication group may still use what those take down, and the exit code would be a crash.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # joins what is not a daemon, as the interpreter does
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001 - as the interpreter does at its end
        traceback.print_exc()
        code = code or 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120  # what the interpreter answers then
    os._exit(code)
