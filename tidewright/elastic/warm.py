"""What the zygote imports and runs before its first fork, and when it must not."""

import importlib
import importlib.metadata
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MODULES: Final = (
    "numpy",
    "paddle",
    "paddle.nn.functional",
    "paddle.io",
    "paddle.optimizer",
    "paddle.base.layer_helper",
    "http.client",
    "tidewright.elastic.job",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmth:
    """What is imported; ``paddle`` None: not installed, or not to be imported before a fork, as ``reason`` says."""

    paddle: str | None
    reason: str = ""


def decide_warm(*, distributions: Iterable[str], devices: Iterable[str]) -> str:
    """Why Paddle must not be imported here ("" if it may).

    A GPU wheel opens the driver when it is imported, and what was opened does not work after a fork.
    """
    names = sorted({name.lower().replace("_", "-") for name in distributions})
    if not any(name.startswith("paddlepaddle") for name in names):
        return "PaddlePaddle is not installed"
    if any(name.startswith("paddlepaddle-gpu") for name in names) and any(True for _ in devices):
        return "PaddlePaddle for GPUs on a machine with GPUs: each worker imports it by itself"
    return ""


def warm_up(extra: Iterable[str]) -> Warmth:
    """Import what workers need and run the first operators once, so that a fork is ready to step."""
    installed = [str(distribution.name) for distribution in importlib.metadata.distributions()]
    reason = decide_warm(distributions=installed, devices=map(str, Path("/dev").glob("nvidia[0-9]*")))
    if reason:
        return Warmth(paddle=None, reason=reason)
    try:
        for name in (*MODULES, *extra):
            importlib.import_module(name)
    except (ImportError, OSError) as error:
        return Warmth(paddle=None, reason=f"import failed: {error}")
    import paddle

    with paddle.no_grad():
        paddle.nn.functional.relu(paddle.ones([1, 1]))
    touch_pages()
    layer = paddle.nn.Sequential(paddle.nn.Conv2D(1, 2, 3), paddle.nn.Flatten(), paddle.nn.Linear(8, 2))
    paddle.nn.functional.cross_entropy(layer(paddle.ones([2, 1, 4, 4])), paddle.to_tensor([0, 1])).backward()
    return Warmth(paddle=importlib.metadata.version(_distribution_name(installed)))


def touch_pages() -> None:
    """Compute a little with all that a step needs, and leave no trace: no name, no parameter, no random number.

    After a fork every page that is written to is copied first; a standby does that before it is asked for anything.
    """
    paddle = sys.modules.get("paddle")
    if paddle is None:
        return
    functional = paddle.nn.functional
    images, kernel = paddle.ones([2, 1, 8, 8]), paddle.ones([2, 1, 3, 3])
    kernel.stop_gradient = False
    flat = functional.relu(functional.conv2d(images, kernel, padding=1)).flatten(1)
    weight = paddle.ones([128, 4])
    weight.stop_gradient = False
    functional.cross_entropy(paddle.matmul(flat, weight), paddle.to_tensor([0, 1]), reduction="sum").backward()


def _distribution_name(installed: Iterable[str]) -> str:
    return next(name for name in sorted(installed) if name.lower().startswith("paddlepaddle"))
