"""The sub-commands of `warmroute events`, one module each, and what they share."""
