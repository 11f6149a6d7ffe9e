"""SqueezeAttention: budgets that differ between layers, at equal memory.

Wang et al. 2024, arXiv 2404.04793: layers whose attention changes the residual stream
little get smaller budgets, and what they save goes to the others. kvjax takes a budget
per layer (`budget=(256, 512, ...)`), but does not yet work one out from a prompt, so
there is nothing to measure under this name.
"""


def get_config():
    """Raises ValueError: the allocation of budgets is not there yet."""
    raise ValueError(
        "SqueezeAttention is missing: kvjax does not yet derive layers' budgets from a "
        "prompt; give a method one `budget` per layer by hand instead"
    )
