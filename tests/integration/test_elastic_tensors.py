"""Tensors of batches and of what is reduced: what Paddle's own constructor makes, without what it loses each time."""

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tidewright.elastic.backend import ARENAS_MAX, make_tensor, on_cpu, paddle

ARRAYS = {
    "a batch": np.arange(12, dtype=np.float32).reshape(3, 4),
    "wide": np.linspace(0, 1, 5),
    "labels": np.array([1, 2, 3], np.int64),
    "bytes": np.frombuffer(b"state", np.uint8),
    "mask": np.array([True, False]),
    "half": np.ones((2, 2), np.float16),
    "a view": np.arange(12).reshape(3, 4)[:, ::2],
    "by columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "nothing": np.zeros((0, 3), np.float32),
    "one number": np.array(3.0),
    "another type": np.array([1, 2], np.uint16),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS.keys())
def test_it_is_what_paddle_makes(array: np.ndarray[Any, Any]) -> None:
    made, expected = make_tensor(array), paddle.to_tensor(array)
    assert (made.dtype, list(made.shape)) == (expected.dtype, list(expected.shape))
    assert (made.stop_gradient, str(made.place)) == (expected.stop_gradient, str(expected.place))
    np.testing.assert_array_equal(made.numpy(), expected.numpy())


def test_it_is_a_copy() -> None:
    array = np.zeros(3)
    made = make_tensor(array)
    array[0] = 1
    assert made.numpy().tolist() == [0, 0, 0]


@pytest.mark.parametrize("make", [make_tensor, on_cpu])
def test_nothing_is_lost_with_each(make: Any) -> None:
    array = np.ones((4, 4), np.float32)
    make(array)
    before = lists()
    for _ in range(200):
        make(array)
    assert lists() - before < 20


def lists() -> int:
    gc.collect()
    return sum(type(each) is list for each in gc.get_objects())


THREADS = """
import ctypes, re, sys, threading
from tidewright.elastic.backend import prepare_backend
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
libc.fopen.argtypes, libc.malloc_info.argtypes = [ctypes.c_char_p] * 2, [ctypes.c_int, ctypes.c_void_p]
libc.fclose.argtypes = [ctypes.c_void_p]

def arenas():
    file = libc.fopen(sys.argv[1].encode(), b"w")
    libc.malloc_info(0, file)
    libc.fclose(file)
    return len(re.findall("<heap nr=", open(sys.argv[1]).read()))

prepare_backend()
before, together = arenas(), threading.Barrier(12)
def work():
    together.wait()
    for _ in range(200):
        libc.malloc(5000)
threads = [threading.Thread(target=work) for _ in range(12)]
for each in threads: each.start()
for each in threads: each.join()
print(before, arenas())
"""


def test_threads_share_few_arenas(tmp_path: Path) -> None:
    """Of the C library: each group has new threads, and what they leave free is to be of use to the next ones."""
    environment = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    command = [sys.executable, "-c", THREADS, str(tmp_path / "arenas")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    before, after = map(int, done.stdout.split()[-2:])
    assert after <= max(before, ARENAS_MAX)
