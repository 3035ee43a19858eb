"""The ``tide`` command: speaks HTTP to intake and nothing else; JSON in, JSON out."""
