"""The engine: its loop, and the scheduler that decides what each step computes."""
