"""What a trace or a log says about sharing: how much there is, what cache it takes, and what breaks it."""
