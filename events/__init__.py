"""The contract: a replica's cache events, and the tools that read them."""
