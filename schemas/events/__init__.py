"""Every event of the system, a module per topic. ``schemas.registry`` lists them by type."""
