"""Other processes that place requests beside this one: workers behind the same port, and routers that are peers."""
