"""Reading KV blocks from a neighbour replica: a server beside the engine, and the pulls of a mover thread."""
