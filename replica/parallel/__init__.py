"""Tensor parallelism: one replica whose model is computed by several processes of one machine (decision 0045)."""
