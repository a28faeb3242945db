"""The page that shows a fleet at work: its files, and what they ask for (docs/router-api.md says what the fields mean)."""
