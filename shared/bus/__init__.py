"""The log of events as readers see it: a small port, its Postgres carrier, positions, quarantine, wake-ups."""
