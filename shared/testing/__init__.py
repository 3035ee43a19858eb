"""What tests of every service need: a real Postgres, a clock that stands still, a harness for handlers."""
