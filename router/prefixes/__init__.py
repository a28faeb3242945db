"""What prompts have begun alike of late: remembered in bounds, made into a tree when asked for, and drawn."""
