"""Decides the environment of a member's process: what Tidewright, Paddle and the accelerators need to know."""

from collections.abc import Mapping
from dataclasses import dataclass

from schemas.vocabulary import Mode
from services.execution.core.state import Generation, Job, Member

_SERVER_ROLES = frozenset({"ps", "pserver", "server"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where things are for one member: the membership endpoint and its folders."""

    address: str
    token: str
    member_directory: str
    checkpoint_directory: str
    output_directory: str
    host: str
    has_gpus: bool


def member_environment(job: Job, member: Member, *, places: Places, variables: Mapping[str, str]) -> dict[str, str]:
    """The user's variables first, so that none of them hides one of ours."""
    environment = dict(variables)
    environment |= {
        "TIDE_ADDRESS": places.address,
        "TIDE_TOKEN": places.token,
        "TIDE_MEMBER": member.name,
        "TIDE_NONCE": member.nonce,
        "TIDE_ATTEMPT": str(member.attempt),
        "TIDE_MEMBER_DIRECTORY": places.member_directory,
        "TIDE_CHECKPOINT_DIRECTORY": places.checkpoint_directory,
        "TIDE_OUTPUT_DIRECTORY": places.output_directory,
        "PYTHONUNBUFFERED": variables.get("PYTHONUNBUFFERED", "1"),
    }
    if places.has_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(number) for number in member.devices)
    if places.host == "127.0.0.1":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    if job.spec is not None and job.spec.mode is not Mode.LIVE:
        generation = next((g for g in reversed(job.generations) if member.name in g.members), None)
        if generation is not None:
            environment |= _paddle_environment(job, member, generation, places)
    return environment


def _paddle_environment(job: Job, member: Member, generation: Generation, places: Places) -> dict[str, str]:
    """As ``paddle.distributed.launch`` sets it: ranks and endpoints per role, servers known to all."""
    endpoints = {
        name: f"{places.host}:{port}" for name, port in zip(generation.members, generation.ports, strict=False)
    }
    servers = [n for n in generation.members if n.split("/")[1] in _SERVER_ROLES]
    trainers = [n for n in generation.members if n not in servers]
    mine = servers if member.name in servers else trainers
    own = endpoints.get(member.name, "")
    result = {
        "PADDLE_TRAINERS_NUM": str(len(trainers)),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints.get(n, "") for n in trainers),
        "PADDLE_CURRENT_ENDPOINT": own,
        "PADDLE_MASTER": endpoints.get(trainers[0], "") if trainers else "",
        "PADDLE_RANK_IN_NODE": str(mine.index(member.name)),
        "TRAINING_ROLE": "PSERVER" if member.name in servers else "TRAINER",
        "POD_IP": places.host,
        "PADDLE_PORT": own.rpartition(":")[2],
    }
    if member.name in trainers:
        result["PADDLE_TRAINER_ID"] = str(trainers.index(member.name))
    if servers:
        result["PADDLE_PSERVERS_IP_PORT_LIST"] = ",".join(endpoints.get(n, "") for n in servers)
    if places.has_gpus:
        result["FLAGS_selected_gpus"] = ",".join(str(i) for i in range(len(member.devices)))
    else:
        result["PADDLE_DISTRI_BACKEND"] = "gloo"
    return result
