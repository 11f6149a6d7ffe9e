"""Budget rules: how many KV pairs each layer, or each head, keeps.

::

    base.py               BudgetRule, and the checks of its sizes
    basic.py              uniform, proportional, explicit
    pyramid_kv.py         pyramid (PyramidKV)
    squeeze_attention.py  squeeze (SqueezeAttention)
    by_calibration.py     calibrated, ada (Ada-KV): sizes per head from a calibration

`make` takes the name of a rule, one of `names()`, one of your own that you `register`,
or `my_rules:my_function`.
"""

from kvjax.cache.budgets.base import (
    BudgetRule,
    allocated,
    check_least,
    for_prompts,
    largest_remainders,
    possible,
    reallocated,
)
from kvjax.cache.budgets.basic import explicit, proportional, uniform
from kvjax.cache.budgets.by_calibration import ada, calibrated
from kvjax.cache.budgets.pyramid_kv import pyramid
from kvjax.cache.budgets.squeeze_attention import squeeze
from kvjax.registry import Registry
from kvjax.types import UserError

_REGISTRY = Registry("budget rule")
register, names = _REGISTRY.register, _REGISTRY.names

for _factory in (ada, calibrated, explicit, proportional, pyramid, squeeze, uniform):
    register(_factory.__name__, _factory)


def make(rule: BudgetRule | str, **options) -> BudgetRule:
    """The rule of that name, or `module:function` of the user's own; or as it is.

    Raises:
      UserError: an unknown name, something that is no rule, or half of the two
        functions that work together.
    """
    found = _REGISTRY.make(rule, **options) if isinstance(rule, str) else rule
    if not isinstance(found, BudgetRule):
        raise UserError(f"budget rule {rule!r} is no kvjax.cache.budgets.BudgetRule")
    if (found.measure is None) != (found.reallocate is None):
        raise UserError(
            f"budget rule {found.name!r} has one of measure and reallocate: what is "
            "measured is for reallocating, give both or none"
        )
    return found


__all__ = [
    "BudgetRule",
    "ada",
    "allocated",
    "calibrated",
    "check_least",
    "explicit",
    "for_prompts",
    "largest_remainders",
    "make",
    "names",
    "possible",
    "proportional",
    "pyramid",
    "reallocated",
    "register",
    "squeeze",
    "uniform",
]
