"""Memory below the block pool's own: the host's, and a disk's."""
