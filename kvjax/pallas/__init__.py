"""Kernels for TPU and GPU: arrays in, arrays out; `kvjax.implementations` chooses."""
