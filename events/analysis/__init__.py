"""The analyses behind the tools, of streams and trees: no sockets and no output, but in `grading`."""
