"""Batches as arrays: one bind array a column, unnested by Postgres into rows in their order.

Statements are built once, when a module is imported: compiling one costs more than its rows.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Integer,
    LargeBinary,
    Table,
    Text,
    bindparam,
    cast,
    column,
    func,
    select,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB, Insert, insert
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


def columns_of(table: Table) -> Columns:
    """The table's columns as they travel: all but those that Postgres fills in; JSON and collated text as text."""
    return [(c.name, _travels_as(c)) for c in table.columns if c.server_default is None]


def insert_rows(table: Table, columns: Columns) -> Insert:
    """Insert a batch in its order; what the table keeps as JSON comes as text."""
    source = unnested("rows", columns)
    names = [name for name, _ in columns]
    values = [
        cast(source.c[name], JSONB) if isinstance(table.c[name].type, JSONB) else source.c[name] for name in names
    ]
    return insert(table).from_select(names, select(*values).order_by(source.c.n))


def upsert_rows(table: Table, columns: Columns) -> Insert:
    """As ``insert_rows``; a row whose primary key is there replaces it. No key may come twice in one batch."""
    statement = insert_rows(table, columns)
    keys = [c.name for c in table.primary_key.columns]
    changed = {name: statement.excluded[name] for name, _ in columns if name not in keys}
    return statement.on_conflict_do_update(index_elements=keys, set_=changed)


def _travels_as(source: Column[Any]) -> TypeEngine[Any]:
    return TEXT if isinstance(source.type, Text | JSONB) else source.type
