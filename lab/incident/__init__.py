"""A recorded hour again: the events and requests that a router had, through the router's own logic, in virtual time."""
