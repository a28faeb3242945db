"""A fleet.toml as the plan of a fleet, with the lines of its mistakes."""
