"""`warmroute up`: from nothing to a fleet that answers."""
