"""Layouts of the KV cache in memory: the interface `Layout`, and `DEFAULT` (dense).

A layout of your own is a `Layout` of pure functions, `register`ed by a name.
"""

from kvjax.cache.layouts import dense
from kvjax.cache.layouts.base import (
    Layout,
    insert_rows,
    live_bytes,
    partition_rows,
    select_rows,
)
from kvjax.registry import Registry
from kvjax.types import UserError

DEFAULT = dense.LAYOUT
_REGISTRY = Registry("layout")
register, names = _REGISTRY.register, _REGISTRY.names

register(DEFAULT.name, lambda: DEFAULT)


def make(layout: Layout | str, **options) -> Layout:
    """Returns the layout of a name, or of a user's `module:function`; or it unchanged.

    Raises:
      UserError: an unknown name, or something that is no layout.
    """
    found = _REGISTRY.make(layout, **options) if isinstance(layout, str) else layout
    if not isinstance(found, Layout):
        raise UserError(
            f"layout {layout!r} is no kvjax.cache.layouts.Layout: {found!r}"
        )
    return found


__all__ = [
    "DEFAULT",
    "Layout",
    "insert_rows",
    "live_bytes",
    "make",
    "names",
    "partition_rows",
    "register",
    "select_rows",
]
