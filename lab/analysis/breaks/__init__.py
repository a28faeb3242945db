"""Which prompts break sharing early, and where: found in the text of a log that has it."""
