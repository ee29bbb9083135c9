"""Valid values of every message, drawn from the declared field types alone."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

from rankgate.proto.messages import MESSAGES, Kind

_TEXT = st.characters(codec="utf-8")


@cache
def of(struct: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Return a strategy of valid instances of a struct."""
    return _of(inspect.type_info(struct))


def _of(info: inspect.Type) -> st.SearchStrategy[Any]:
    match info:
        case inspect.IntType(ge=low, le=high):
            return st.integers(0 if low is None else low, (1 << 64) - 1 if high is None else high)
        case inspect.StrType(max_length=most):
            return st.text(_TEXT, max_size=min(most or 8, 8))
        case inspect.BytesType(min_length=least, max_length=most):
            return st.binary(min_size=least or 0, max_size=min(most or 32, 32))
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.ListType(item_type=item):
            return st.lists(_of(item), max_size=2)
        case inspect.VarTupleType(item_type=item):
            return st.lists(_of(item), max_size=2).map(tuple)
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(_of(key), _of(value), max_size=2)
        case inspect.UnionType(types=types):
            return st.one_of([_of(each) for each in types])
        case inspect.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{field.name: _of(field.type) for field in fields})
    raise NotImplementedError(info)


def any_message() -> st.SearchStrategy[tuple[Kind, Any]]:
    """Return a strategy of (kind, message) over all kinds."""
    return st.sampled_from(list(MESSAGES)).flatmap(
        lambda kind: of(MESSAGES[kind]).map(lambda message: (kind, message))
    )
