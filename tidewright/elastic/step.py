"""What one round of a script's training loop gets."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidewright.elastic.errors import ElasticError


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of this worker.

    ``ids``: the samples of this worker's part, as indices into the dataset. ``global_batch``: how many samples all
    workers use in this step; divide the sum of the losses by it. ``data``: the parts of the dataset, as tensors; the
    first is ``inputs``, the second ``labels``. Where the batch has fewer samples than there are workers, ``ids`` may
    be empty: ``data`` then holds one sample that does not count, and ``apply`` knows.
    """

    index: int
    epoch: int
    is_epoch_end: bool
    ids: NDArray[np.int64]
    global_batch: int
    data: tuple[Any, ...] = field(repr=False)

    @property
    def inputs(self) -> Any:
        return self.data[0]

    @property
    def labels(self) -> Any:
        if len(self.data) < 2:
            raise ElasticError("step.labels: the dataset has one part only; use step.inputs or step.data")
        return self.data[1]
