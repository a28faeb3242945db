"""Requests of completions and chats: their fields, their limits, and the forms that answers may be held to."""
