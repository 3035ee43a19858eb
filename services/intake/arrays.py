"""Batches as arrays: one bind array a column, unnested by Postgres into rows in their order."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import BigInteger, Boolean, DateTime, Integer, LargeBinary, Text, bindparam, column, func
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.sql.selectable import TableValuedAlias
from sqlalchemy.types import TypeEngine

TEXT: Final = Text()
BYTES: Final = LargeBinary()
INTEGER: Final = Integer()
BIGINT: Final = BigInteger()
BOOLEAN: Final = Boolean()
INSTANT: Final = DateTime(timezone=True)

Columns = Sequence[tuple[str, TypeEngine[Any]]]


def unnested(name: str, columns: Columns) -> TableValuedAlias:
    """A row source named ``name`` with these columns and ``n``, the place in the batch. Build it once."""
    arrays = [bindparam(f"all_{column_name}", type_=ARRAY(kind)) for column_name, kind in columns]
    source = func.unnest(*arrays).table_valued(
        *[column(column_name, kind) for column_name, kind in columns], with_ordinality="n", name=name
    )
    return source.render_derived()


def as_arrays(columns: Columns, rows: Iterable[Sequence[Any]]) -> Mapping[str, list[Any]]:
    """The parameters for ``unnested``. Raises ValueError if a row has another length."""
    transposed: list[list[Any]] = [[] for _ in columns]
    for row in rows:
        for values, value in zip(transposed, row, strict=True):
            values.append(value)
    return {f"all_{name}": values for (name, _), values in zip(columns, transposed, strict=True)}
