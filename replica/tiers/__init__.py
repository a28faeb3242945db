"""Cached blocks outside the block pool: in host memory, on disk, at neighbours."""
