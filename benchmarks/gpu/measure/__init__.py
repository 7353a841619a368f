"""How long a device takes, for which calls, and what it would need at least."""
