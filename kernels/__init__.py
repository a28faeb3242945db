"""Attention and KV-write kernels for CPU and GPU, one reference each."""
