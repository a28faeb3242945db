"""The sub-commands of `warmroute events`, one module each, and their shared parts."""
