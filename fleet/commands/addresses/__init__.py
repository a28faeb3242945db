"""Where commands find fleets and routers: on this machine, or by an address."""
