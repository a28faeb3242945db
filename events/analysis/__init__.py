"""The analyses behind the tools: of streams and trees, without sockets and without output."""
