"""Calibrations: how many KV pairs each head of a model needs, measured on texts.

::

    scores [L, K, T]   of a text's pairs, from `kvjax.engine.calibration`
      |   kept_shares      one threshold over all layers and heads, for every ratio
      v
    Measured           shares of every text     -> `stability`     (measured.py)
      |   average          over the texts, with a floor
      v
    Calibration        shares per head, rounded to sizes            (calibration.py)
      |   keep             in the user's folder
      v
    find               by the fingerprint of a model's weights      (files.py)

No function here runs a model.
"""

from kvjax.cache.calibrations.calibration import (
    AMONG,
    FLOOR,
    Calibration,
    Rows,
    checked_among,
    checked_ratios,
)
from kvjax.cache.calibrations.files import (
    LOSS,
    TARGETS,
    Given,
    checked_target,
    find,
    keep,
    kept_path,
    of_model,
    own_folder,
    shipped,
)
from kvjax.cache.calibrations.measured import (
    NEWEST,
    SINKS,
    Measured,
    average,
    kept_shares,
    stability,
    whole_shares,
)

__all__ = [
    "AMONG",
    "FLOOR",
    "LOSS",
    "NEWEST",
    "SINKS",
    "TARGETS",
    "Calibration",
    "Given",
    "Measured",
    "Rows",
    "average",
    "checked_among",
    "checked_ratios",
    "checked_target",
    "find",
    "keep",
    "kept_path",
    "kept_shares",
    "of_model",
    "own_folder",
    "shipped",
    "stability",
    "whole_shares",
]
