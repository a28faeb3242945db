"""HTTP as router and replica both serve it: connections with limits, their server, errors as answers."""
