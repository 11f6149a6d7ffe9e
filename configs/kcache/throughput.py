"""KCache: keys on the device, values in host memory.

He & Wu 2024, arXiv 2404.18057: values of the few keys that get most of the attention
are fetched when they are needed. kvjax keeps pairs on one device only, so there is
nothing to measure under this name.
"""


def get_config():
    """Raises ValueError: host memory for values is not there yet."""
    raise ValueError(
        "KCache is missing: kvjax does not yet keep values in host memory; see "
        "configs/batch_max for what can be compared"
    )
