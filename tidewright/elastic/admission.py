"""Asks execution whether this process may run user code."""

import random
import socket
import time
from collections.abc import Mapping
from typing import Final

from tidewright import protocol

ANSWER_SECONDS: Final = 10.0
"""How long one question waits for its answer before it is asked again."""
BACK_OFF_SECONDS_FIRST: Final = 0.02
BACK_OFF_SECONDS_MAX: Final = 0.25


class NotAdmitted(Exception):
    """Execution refused this process: it must end without running user code."""


def address_of(text: str) -> tuple[str, int]:
    """``host:port`` (IPv6 hosts in brackets). Raises ValueError naming the variable."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"{protocol.ADDRESS_VARIABLE} must be host:port, got {text!r}")
    return host.strip("[]"), int(port)


def wait_for_admission(environment: Mapping[str, str], pid: int) -> None:
    """Ask until answered; execution may be down for as long as it likes. Raises NotAdmitted.

    Without an address there is nobody to ask, and the process runs.
    """
    if not environment.get(protocol.ADDRESS_VARIABLE):
        return
    address = address_of(environment[protocol.ADDRESS_VARIABLE])
    question = protocol.Admit(
        token=environment.get(protocol.TOKEN_VARIABLE, ""),
        member=environment.get(protocol.MEMBER_VARIABLE, ""),
        nonce=environment.get(protocol.NONCE_VARIABLE, ""),
        pid=pid,
    )
    jitter = random.SystemRandom()  # forked processes share the state of the ordinary generator
    back_off = BACK_OFF_SECONDS_FIRST
    while True:
        answer = _ask(address, question)
        if isinstance(answer, protocol.Admitted):
            return
        if isinstance(answer, protocol.Refused):
            raise NotAdmitted(answer.reason)
        time.sleep(back_off * (0.5 + jitter.random()))
        back_off = min(2 * back_off, BACK_OFF_SECONDS_MAX)


def _ask(address: tuple[str, int], question: protocol.Admit) -> protocol.Message | None:
    """One question on a connection of its own; None if there was no answer, or none of execution's."""
    try:
        with socket.create_connection(address, ANSWER_SECONDS) as connection, connection.makefile("rb") as lines:
            knock = protocol.Knock(member=question.member)
            connection.sendall(protocol.encode(knock))
            proof = protocol.decode(lines.readline(protocol.LINE_BYTES_MAX))
            if not isinstance(proof, protocol.Proof) or not proof.is_of(knock, token=question.token):
                return None
            connection.sendall(protocol.encode(question))
            return protocol.decode(lines.readline(protocol.LINE_BYTES_MAX))
    except (OSError, protocol.ProtocolError):
        return None
