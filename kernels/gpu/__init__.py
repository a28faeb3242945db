"""Kernels for a GPU. Whoever imports a module of these needs what it is written in."""
