"""OpenAI's Responses API: its requests as chats, and its responses and events."""
