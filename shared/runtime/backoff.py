"""How long to wait before trying again: pure, so that it can be read and tested."""


def backoff_seconds(failures: int, *, first: float = 0.05, maximum: float) -> float:
    """Doubles with each failure in a row: ``first`` after one, never above ``maximum``."""
    return min(maximum, first * 2.0 ** min(max(failures - 1, 0), 30))
