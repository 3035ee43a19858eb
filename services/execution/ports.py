"""The executor port: how execution has processes started, looks at them, and ends them."""

import asyncio
from collections.abc import Collection
from typing import Protocol

from schemas.resources import Resources
from schemas.vocabulary import MemberName, NodeName
from services.execution.core.seen import Process
from services.execution.core.state import Member


class Executor(Protocol):
    """Two adapters: this machine, and timers. Calls are quick; what takes long runs in a loop of its own."""

    @property
    def node(self) -> NodeName: ...

    @property
    def size(self) -> Resources:
        """What the node offers as a whole."""

    @property
    def accelerators(self) -> int: ...

    def start(self, name: MemberName) -> None:
        """Have a committed member started soon. Repeating is harmless."""

    def look(self, member: Member, *, watch_activity: bool) -> Process: ...

    def terminate(self, name: MemberName) -> None: ...

    def kill(self, name: MemberName) -> None: ...

    async def run_starts(self, stopping: asyncio.Event) -> None:
        """What starts members, while the lease is held."""

    def keep_only(self, names: Collection[MemberName]) -> None:
        """Let go of members that nobody looks after any more. Their processes are not touched."""
