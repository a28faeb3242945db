"""Kernels for a GPU. Importing a module needs the library that it is written in."""
