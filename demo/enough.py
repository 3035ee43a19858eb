"""How all workers of a job agree to end early, at the same epoch, though only some were told."""

import signal
from pathlib import Path


class Enough:
    """SIGUSR1, or that the file ``asked`` exists, says that it is enough.

    The file ``last-epoch`` in a folder that all workers share says since when.
    Whoever is rank 0 at the end of an epoch names the next one as the last, before it takes part in any step of it:
    all others have seen the file when that epoch ends. The file stays if rank 0 is lost. No folder: a job of one.
    """

    def __init__(self, folder: Path | None, *, asked: Path | None = None) -> None:
        self._told = False
        self._asked = asked
        self._path = folder / "last-epoch" if folder is not None else None
        signal.signal(signal.SIGUSR1, self._on_signal)

    def is_last(self, *, epoch: int, rank: int) -> bool:
        """To be asked by every worker at the end of each epoch."""
        if self._path is None:
            return self._told
        if rank == 0 and self._is_told() and not self._path.exists():
            draft = self._path.with_suffix(".new")
            draft.write_text(str(epoch + 1))
            draft.replace(self._path)
        return self._path.exists() and epoch >= int(self._path.read_text())

    def _is_told(self) -> bool:
        return self._told or (self._asked is not None and self._asked.exists())

    def _on_signal(self, *_: object) -> None:
        self._told = True
