"""What is learned by following a loss down its gradient: the sizes of heads.

`fit_heads` moves pairs of a calibration to the heads that miss them most.
"""

from kvjax.training.head_sizes import fit_heads as fit_heads
