"""From a request's messages to the prompt of its model: chat templates, and what clients may not put into one."""
