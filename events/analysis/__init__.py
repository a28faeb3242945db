"""What the tools find out about a stream or a tree, without sockets and without output."""
