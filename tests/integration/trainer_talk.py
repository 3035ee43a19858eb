"""What a test says in a trainer's place, over a raw connection to execution."""

import asyncio
from contextlib import suppress
from typing import Any, ClassVar

from integration.execution_bed import ExecutionBed

from schemas.vocabulary import Mode
from shared.signing import trainer_token
from shared.testing.harness import TEST_KEY
from tidewright import protocol

SLEEPER = "import time\nprint('runs')\ntime.sleep(300)\n"


class Talk:
    """A raw connection to the endpoint."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    opened: ClassVar[list["Talk"]] = []

    @classmethod
    async def open(cls, bed: ExecutionBed) -> "Talk":
        """As far as a trainer comes before it says who it is. Raises OSError while nobody answers."""
        talk = await cls.silent(bed)
        talk.say(protocol.Knock(member="j1/worker/0/1"))
        if not isinstance(await talk.hear(), protocol.Proof):
            raise ConnectionAbortedError("the knock was not answered")
        return talk

    @classmethod
    async def silent(cls, bed: ExecutionBed) -> "Talk":
        """A connection on which nothing was said yet."""
        port = int((bed.state / "membership.port").read_text())
        talk = cls(*await asyncio.open_connection("127.0.0.1", port))
        cls.opened.append(talk)
        return talk

    @classmethod
    async def close_all(cls) -> None:
        while cls.opened:
            writer = cls.opened.pop().writer
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def say(self, message: protocol.Message) -> None:
        self.writer.write(protocol.encode(message))

    async def hear(self, seconds: float = 10.0) -> protocol.Message | None:
        """The next message; None when the connection was closed."""
        async with asyncio.timeout(seconds):
            try:
                line = await self.reader.readline()
            except ConnectionError:
                return None
        return protocol.decode(line) if line else None


def hello(job: str, **changes: Any) -> protocol.Hello:
    values = {
        "version": protocol.PROTOCOL_VERSION,
        "token": trainer_token(TEST_KEY, job),
        "member": f"{job}/worker/0/1",
        "nonce": "",
        "pid": 1,
        "attempt": 1,
        "generation": 0,
        "formed": 0,
        "step": 0,
        "rank": -1,
        "world": 0,
        "phase": "starting",
        "waiting": False,
    }
    return protocol.Hello(**{**values, **changes})


async def run_sleeper(bed: ExecutionBed, job: str) -> str:
    """A live job whose script never joins, so that the test can speak for it. Gives its nonce."""
    script = bed.state / "sleeper.py"
    script.write_text(SLEEPER)
    await bed.submit(job, mode=Mode.LIVE, script=str(script))
    await bed.grant(job, 1)

    async def admitted() -> Any:
        return [m["nonce"] for m in await bed.members(job) if m["state"] == "admitted"]

    return (await bed.until(admitted))[0]
