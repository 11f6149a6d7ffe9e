"""Kernels for TPU and GPU: arrays in, arrays out; `kvjax.attention.backends` chooses."""
