"""One engine, paged, prefix-cached and continuously batched, with its HTTP server."""
