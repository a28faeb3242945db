"""`warmroute events`, with the command of its group that needs the router's pages."""

from events.cli import events

VIEW = "Look at a recording in a browser: the tree at any moment, gaps and restarts over time."

events.table = {**events.table, "view": ("router.dashboard.recording_server:view", VIEW)}

__all__ = ["events"]
