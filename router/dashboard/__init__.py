"""The dashboard: its files, and the answers that they ask for (docs/router-api.md says what the fields mean)."""
