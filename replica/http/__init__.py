"""The HTTP side of a replica: requests come in and become work for the engine, whose tokens become answers."""
