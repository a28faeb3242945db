"""The model on a CPU, in one process or over several ranks."""
