"""Where pairs lie: `Layout` says what that takes, `DEFAULT` is the one of the package.

A layout of your own is a `Layout` of pure functions, `register`ed by a name.
"""

from kvjax.cache.layouts import dense
from kvjax.cache.layouts.base import Layout, insert_rows
from kvjax.registry import Registry
from kvjax.types import UserError

DEFAULT = dense.LAYOUT
_REGISTRY = Registry("layout")
register, names = _REGISTRY.register, _REGISTRY.names

register(DEFAULT.name, lambda: DEFAULT)


def make(layout: Layout | str, **options) -> Layout:
    """The layout of that name, or `module:function` of the user's own; or as it is.

    Raises:
      UserError: an unknown name, or something that is no layout.
    """
    found = _REGISTRY.make(layout, **options) if isinstance(layout, str) else layout
    if not isinstance(found, Layout):
        raise UserError(
            f"layout {layout!r} is no kvjax.cache.layouts.Layout: {found!r}"
        )
    return found


__all__ = ["DEFAULT", "Layout", "insert_rows", "make", "names", "register"]
