"""Anthropic's Messages API: its requests as chats, and its responses, events and errors."""
