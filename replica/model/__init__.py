"""A real model: what its folder says, its weights, and the network itself."""
