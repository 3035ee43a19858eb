"""What goes wrong in a training script, and what goes wrong with a group."""


class ElasticError(Exception):
    """The script uses this package in a way that cannot work; the text says how to mend it."""


class GroupBroken(Exception):
    """A collective did not come to its end: a peer is gone, stuck, or has let the group go."""


class Dismissed(GroupBroken):
    """The group for which others have left this one has started: this one is over."""


class CheckpointBroken(Exception):
    """A folder that is no whole checkpoint: a file is missing, cut off or changed.

    ``is_damaged`` False: it could not be read, and may be whole all the same.
    """

    def __init__(self, text: str, *, is_damaged: bool = True) -> None:
        super().__init__(text)
        self.is_damaged = is_damaged


class StateLost(ElasticError):
    """Steps were applied, and none of the checkpoints that the group could go on from is whole."""
