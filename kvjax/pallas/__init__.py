"""Kernels for TPU and GPU: arrays in, arrays out; see `kvjax.attention.backends`."""
