"""The wire between a trainer and execution: one JSON object a line over TCP, both ways.

Standard library only, since it is installed in training images. Execution imports it too, so that there is
one definition. Every message is a frozen dataclass; ``KIND`` names it on the wire (field ``t``). A field that
the reader does not know is ignored, one with a default may be missing (an earlier release did not have it), a kind
that it does not know raises ``ProtocolError``.

A trainer's life: ``Admit`` (before any user code) -> ``Admitted`` -> ``Hello`` -> ``Welcome`` -> ``Form`` ->
``Formed`` -> ``Started`` -> ``Mark`` ... -> ``Finished``, or a leaver's ``Left``. The connection may break and come
back at any time: a trainer then says ``Hello`` again with what it holds, and goes on training meanwhile.

Each connection begins with a ``Knock``, and goes on once a ``Proof`` has answered it: another program may listen on
that port while execution is away, and must neither be obeyed nor be told the job's token.
"""

import hmac
import json
import math
import secrets
from dataclasses import MISSING, asdict, dataclass, field, fields
from hashlib import sha256
from typing import Any, ClassVar, Final, TypeAlias

PROTOCOL_VERSION: Final = 1
LINE_BYTES_MAX: Final = 65_536
ADDRESS_VARIABLE: Final = "TIDE_ADDRESS"
"""``host:port`` of execution's membership endpoint; stable across restarts of the service."""
TOKEN_VARIABLE: Final = "TIDE_TOKEN"
MEMBER_VARIABLE: Final = "TIDE_MEMBER"
"""``<job>/<role>/<index>/<incarnation>``."""
NONCE_VARIABLE: Final = "TIDE_NONCE"
ATTEMPT_VARIABLE: Final = "TIDE_ATTEMPT"
MEMBER_DIRECTORY_VARIABLE: Final = "TIDE_MEMBER_DIRECTORY"
"""The member's own folder: its log, ledger and the shim's records."""
CHECKPOINT_DIRECTORY_VARIABLE: Final = "TIDE_CHECKPOINT_DIRECTORY"
OUTPUT_DIRECTORY_VARIABLE: Final = "TIDE_OUTPUT_DIRECTORY"


class ProtocolError(ValueError):
    """A line that is no message of this protocol."""


# -- trainer to execution -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Knock:
    """First line of every connection: is that execution? Says no more than a name before it is known."""

    KIND: ClassVar[str] = "knock"
    member: str
    challenge: str = field(default_factory=lambda: secrets.token_hex(16))


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """May this process run user code? Sent on a connection of its own, repeated until answered."""

    KIND: ClassVar[str] = "admit"
    token: str
    member: str
    nonce: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First word of every lasting connection: who speaks and what it holds.

    ``generation`` is the one it steps in (0: none yet), ``formed`` one that is formed but not yet used (0: none),
    ``step`` the number of steps applied, ``waiting`` that its group is cut and it holds its state.
    """

    KIND: ClassVar[str] = "hello"
    version: int
    token: str
    member: str
    nonce: str
    pid: int
    attempt: int
    generation: int
    formed: int
    step: int
    rank: int
    world: int
    phase: str
    waiting: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A report, every ``mark_seconds``: where the member stands.

    ``phase_seconds`` in the present phase; ``sync_seconds`` waited so far in the collective under way (0: none);
    ``generations``: groups that it has formed or begun to form, each of which costs it a little for
    good (0: not told).
    """

    KIND: ClassVar[str] = "mark"
    generation: int
    step: int
    phase: str
    phase_seconds: float
    sync_seconds: float
    waiting: bool
    generations: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Formed:
    """The group of an offered generation is connected; it is used once all members say so in the gradient buffer."""

    KIND: ClassVar[str] = "formed"
    generation: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FormFailed:
    """The offered generation could not be formed, or was lost before it was used."""

    KIND: ClassVar[str] = "form_failed"
    generation: int
    reason: str
    state_lost: bool = False
    """none of the checkpoints that it was to go on from is whole"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FellBack:
    """The new generation broke before its second all-reduce; the older one goes on."""

    KIND: ClassVar[str] = "fell_back"
    generation: int
    """the generation that goes on"""
    failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The second all-reduce of a generation has passed (with one worker: its second step is applied).

    ``pause_seconds``: end of the last step before it to the end of the first one in it; 0 in a first generation.
    """

    KIND: ClassVar[str] = "started"
    generation: int
    step: int
    rank: int
    world: int
    pause_seconds: float
    resumed_generation: int
    """of the checkpoint it was loaded from; 0: none, or the state came from a living member"""
    resumed_step: int
    skipped: tuple[str, ...] = ()
    """newer checkpoints that were not whole, each as ``g<generation>-s<step>: why``; told by who loaded"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """The group is cut; the member holds its state at ``step`` and waits for the next offer."""

    KIND: ClassVar[str] = "waiting"
    generation: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A leaver is outside the group and about to exit."""

    KIND: ClassVar[str] = "left"
    generation: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWritten:
    KIND: ClassVar[str] = "checkpoint_written"
    generation: int
    step: int
    location: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed:
    KIND: ClassVar[str] = "checkpoint_failed"
    generation: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The group's word: training is complete at ``step``. Repeated after ``Hello`` until the process exits."""

    KIND: ClassVar[str] = "finished"
    generation: int
    step: int


# -- execution to trainer -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Answer to a ``Knock``: who listens knows the token of the member's job."""

    KIND: ClassVar[str] = "proof"
    proof: str

    @classmethod
    def of(cls, knock: Knock, *, token: str) -> "Proof":
        text = f"membership\n{knock.member}\n{knock.challenge}"
        return cls(proof=hmac.new(token.encode(), text.encode("utf-8", "replace"), sha256).hexdigest())

    def is_of(self, knock: Knock, *, token: str) -> bool:
        """Whether this answers that very knock. Compared in constant time."""
        return hmac.compare_digest(self.of(knock, token=token).proof.encode(), self.proof.encode("utf-8", "replace"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The member and its nonce stand in a commit of the holder: run."""

    KIND: ClassVar[str] = "admitted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Not this process: leaving, gone, another nonce, or a wrong token. It exits without running user code."""

    KIND: ClassVar[str] = "refused"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Answer to ``Hello``: settings for this member, and where its samples go ("" while metrics is not known)."""

    KIND: ClassVar[str] = "welcome"
    metrics_url: str
    sample_token: str
    mark_seconds: float
    checkpoint_directory: str
    checkpoint_every_steps: int
    reconnect_seconds_max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """An offer: form the group of ``generation`` in the background, go on stepping meanwhile.

    ``rank`` -1: a leaver; it waits in the old group and exits when the new one has started.
    ``source`` is the rank whose state everyone receives; -1: nobody holds any, rank 0 loads the checkpoint
    ``checkpoint`` (a folder; "" means that the job begins at step 0), or the first whole one of ``older``.
    """

    KIND: ClassVar[str] = "form"
    generation: int
    rank: int
    world: int
    store_host: str
    store_port: int
    source: int
    checkpoint: str
    older: tuple[str, ...] = ()
    """names of folders beside ``checkpoint``, in the order in which they are tried"""
    may_begin_anew: bool = False
    """at step 0 if all of them are damaged: nothing was applied in this attempt"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """The offer of ``generation`` is off. Ignored by whoever steps in it already."""

    KIND: ClassVar[str] = "abort"
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The attempt ends: at the next step boundary write a checkpoint (the lowest rank), then exit with 0."""

    KIND: ClassVar[str] = "stop"
    grace_seconds: float
    reason: str


Message: TypeAlias = (
    Knock
    | Admit
    | Hello
    | Mark
    | Formed
    | FormFailed
    | FellBack
    | Started
    | Waiting
    | Left
    | CheckpointWritten
    | CheckpointFailed
    | Finished
    | Proof
    | Admitted
    | Refused
    | Welcome
    | Form
    | Abort
    | Stop
)
_KINDS: Final[dict[str, type[Message]]] = {cls.KIND: cls for cls in Message.__args__}
NUMBER_MAX: Final = 1 << 53
GENERATION_MAX: Final = 1 << 30
_GENERATIONS: Final = frozenset({"generation", "formed", "failed", "resumed_generation"})
_JSON_TYPES: Final = {"str": str, "int": int, "float": (int, float), "bool": bool, "tuple": list}


def encode(message: Message) -> bytes:
    """One line, newline included."""
    return json.dumps({"t": message.KIND, **asdict(message)}, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Inverse of ``encode``. Raises ProtocolError for anything else, naming the field.

    What comes out can be stored: numbers are finite and within ``NUMBER_MAX``, texts are Unicode (half a surrogate
    pair, as in a file's name that is no UTF-8, becomes "?").
    """
    try:
        value: Any = json.loads(line, parse_int=_number, parse_float=_finite, parse_constant=_finite)
    except ProtocolError:
        raise
    except (ValueError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError("not a line of JSON") from exc
    kind = value.get("t") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ProtocolError("not a message of this protocol")
    cls = _KINDS[kind]
    arguments: dict[str, Any] = {}
    for each in fields(cls):
        name = each.type if isinstance(each.type, str) else each.type.__name__
        expected: Any = _JSON_TYPES[name]
        if each.name not in value and each.default is not MISSING:
            continue
        got = value.get(each.name)
        if not isinstance(got, expected) or (isinstance(got, bool) and name != "bool"):
            raise ProtocolError(f"{kind}.{each.name} must be {name}")
        if each.name in _GENERATIONS and got > GENERATION_MAX:
            raise ProtocolError(f"{kind}.{each.name} must be at most {GENERATION_MAX}")
        if isinstance(got, list):
            if not all(isinstance(text, str) for text in got):
                raise ProtocolError(f"{kind}.{each.name} must be a list of strings")
            got = tuple(unicode_of(text) for text in got)
        arguments[each.name] = unicode_of(got) if isinstance(got, str) else got
    return cls(**arguments)


def _number(text: str) -> int:
    number = int(text)
    if abs(number) > NUMBER_MAX:
        raise ProtocolError(f"a number is greater than {NUMBER_MAX}")
    return number


def _finite(text: str) -> float:
    number = float(text)
    if not -math.inf < number < math.inf:
        raise ProtocolError("a number is not finite")
    return number


def unicode_of(text: str) -> str:
    """What UTF-8 and Postgres can hold: half a surrogate pair becomes "?"."""
    return text.encode("utf-8", "replace").decode()
