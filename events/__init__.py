"""The contract: what a replica tells the world about its KV cache, and the tools that read that stream."""
