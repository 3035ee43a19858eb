"""SQL types that SQLAlchemy lacks."""

from typing import Any

from sqlalchemy.dialects.postgresql.base import ischema_names
from sqlalchemy.types import UserDefinedType


class XID8(UserDefinedType[int]):
    """A 64-bit transaction id. Values are ints; bind parameters carry no cast (``bigint`` has none to ``xid8``)."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "XID8"


ischema_names.setdefault("xid8", XID8)
