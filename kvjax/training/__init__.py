"""Learns the number of KV pairs of every head by gradient descent on a loss.

`fit_heads` starts from a calibration and moves its pairs to the heads whose loss of
them costs most.
"""

from kvjax.training.head_sizes import fit_heads as fit_heads
