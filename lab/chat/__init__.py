"""A chat in the terminal, and the demonstration that is made of it."""
