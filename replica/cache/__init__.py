"""Which blocks are in the pool and in the media below it, what they hold and under which names: all of it pure."""
