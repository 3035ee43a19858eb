"""Ending early: every worker at the same epoch, whoever was told and whatever becomes of rank 0."""

import signal
from itertools import permutations

import pytest

from demo.enough import Enough


@pytest.fixture(autouse=True)
def _signal_as_before():
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def tell(worker: Enough) -> None:
    """In this one process the last worker made has the handler, so each is told by hand."""
    worker._on_signal()


def test_the_signal_is_heard():
    worker = Enough(None)
    assert not worker.is_last(epoch=0, rank=0)
    signal.raise_signal(signal.SIGUSR1)
    assert worker.is_last(epoch=0, rank=0)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_all_end_at_the_same_epoch_in_whatever_order_they_ask(order, tmp_path):
    """The signal reaches every worker in the middle of epoch 2; they come to its end one after the other."""
    workers = [Enough(tmp_path) for _ in range(3)]
    assert not any(w.is_last(epoch=1, rank=rank) for rank, w in enumerate(workers))
    for worker in workers:
        tell(worker)
    assert not any(workers[rank].is_last(epoch=2, rank=rank) for rank in order)
    assert all(workers[rank].is_last(epoch=3, rank=rank) for rank in order)


def test_only_others_than_rank_0_were_told(tmp_path):
    rank_0, rank_1 = Enough(tmp_path), Enough(tmp_path)
    tell(rank_1)
    assert not rank_1.is_last(epoch=4, rank=1)
    assert not rank_0.is_last(epoch=5, rank=0)
    assert not rank_1.is_last(epoch=5, rank=1)


def test_a_new_rank_0_keeps_the_word_of_the_lost_one(tmp_path):
    lost, next_one = Enough(tmp_path), Enough(tmp_path)
    tell(lost)
    tell(next_one)
    assert not lost.is_last(epoch=6, rank=0)
    assert next_one.is_last(epoch=7, rank=0)
