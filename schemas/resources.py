"""Sizes: ``Resources``, an integer vector by resource name."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

CPU: Final = "cpu"
MEMORY: Final = "memory"
SHM: Final = "shm"
SLOT: Final = "tidewright.io/slot"
"""Stands for one accelerator on a machine that has none."""
NVIDIA_GPU: Final = "nvidia.com/gpu"
MILLI: Final = 1000
"""One whole unit of every resource that is not counted in bytes."""
_INT64_MAX: Final = 2**63 - 1


@dataclass(frozen=True, slots=True, init=False)
class Resources:
    """Resource name -> non-negative integer: milli-units (``cpu``, accelerators) or bytes (``memory``, ``shm``).

    A name that is absent counts as 0; zeros are not stored, so equal vectors are equal values.
    Subtraction may go below zero in a component: use ``fits`` to compare, ``clipped`` to cut at 0.
    """

    amounts: tuple[tuple[str, int], ...]

    def __init__(self, amounts: Mapping[str, int] | Iterable[tuple[str, int]] = ()) -> None:
        items = dict(amounts)
        object.__setattr__(self, "amounts", tuple(sorted((k, v) for k, v in items.items() if v != 0)))

    def __getitem__(self, name: str) -> int:
        return next((amount for key, amount in self.amounts if key == name), 0)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.amounts)

    def __bool__(self) -> bool:
        return bool(self.amounts)

    def __add__(self, other: "Resources") -> "Resources":
        total = dict(self.amounts)
        for name, amount in other.amounts:
            total[name] = total.get(name, 0) + amount
        return Resources(total)

    def __sub__(self, other: "Resources") -> "Resources":
        return self + other * -1

    def __mul__(self, count: int) -> "Resources":
        return Resources({name: amount * count for name, amount in self.amounts})

    def fits(self, room: "Resources") -> bool:
        """True if every component is at most the room's. A component the room lacks counts as 0 there."""
        return all(amount <= room[name] for name, amount in self.amounts)

    def clipped(self) -> "Resources":
        """Every negative component becomes 0."""
        return Resources({name: max(0, amount) for name, amount in self.amounts})

    def at_most(self, room: "Resources") -> int:
        """How many copies of this vector fit into ``room``. Raises ValueError if this vector is empty."""
        if not self.amounts:
            raise ValueError("an empty size fits any number of times")
        return max(0, min(room[name] // amount for name, amount in self.amounts))

    def as_dict(self) -> dict[str, int]:
        return dict(self.amounts)

    @classmethod
    def _from_object(cls, value: dict[str, int]) -> "Resources":
        return cls(value)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type, handler: GetCoreSchemaHandler) -> CoreSchema:
        of_object = core_schema.no_info_after_validator_function(
            cls._from_object,
            core_schema.dict_schema(
                core_schema.str_schema(min_length=1, max_length=253),
                core_schema.int_schema(ge=0, le=_INT64_MAX),
            ),
        )
        return core_schema.json_or_python_schema(
            json_schema=of_object,
            python_schema=core_schema.union_schema([core_schema.is_instance_schema(cls), of_object]),
            serialization=core_schema.plain_serializer_function_ser_schema(cls.as_dict),
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {
            "type": "object",
            "description": "Resource name -> integer: milli-units, or bytes for memory and shm.",
            "additionalProperties": {"type": "integer", "minimum": 0, "maximum": _INT64_MAX},
        }


def total(sizes: Iterable[Resources]) -> Resources:
    """The sum; empty for no sizes."""
    result = Resources()
    for size in sizes:
        result = result + size
    return result
