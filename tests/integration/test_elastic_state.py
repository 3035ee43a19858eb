"""What is tracked and kept, with real Paddle in this process: layers, optimizers, schedulers, a worker alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tidewright.elastic import shelf
from tidewright.elastic.errors import ElasticError

paddle = pytest.importorskip("paddle")
from tidewright.elastic import Job, join  # noqa: E402
from tidewright.elastic.tracked import Tracked, buckets, copies, from_bytes, set_from, to_bytes  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Paddle's own, of BatchNorm and of scalers on the CPU


class Counter:
    """Something of the user's own."""

    def __init__(self) -> None:
        self.state: dict[Any, Any] = {"best": 0.5, 3: [1, (2, "x")], "mean": paddle.zeros([2]), "array": np.arange(3)}

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.state = state


def make(seed: int) -> tuple[Tracked, Any, Any, Any, Counter]:
    paddle.seed(seed)
    model = paddle.nn.Sequential(
        paddle.nn.Conv2D(1, 2, 3), paddle.nn.BatchNorm2D(2), paddle.nn.Flatten(), paddle.nn.Linear(8, 3)
    )
    schedule = paddle.optimizer.lr.StepDecay(0.1, 2)
    optimizer = paddle.optimizer.AdamW(schedule, parameters=model.parameters(), weight_decay=0.01)
    counter = Counter()
    tracked = Tracked()
    for thing in (model, optimizer, counter, model):
        tracked.add(thing)
    return tracked, model, optimizer, schedule, counter


def step(model: Any, optimizer: Any, schedule: Any, seed: int) -> float:
    inputs = paddle.to_tensor(np.random.RandomState(seed).randn(5, 1, 4, 4).astype("float32"))
    loss = paddle.nn.functional.dropout(model(inputs), 0.3).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad(set_to_zero=False)
    schedule.step()
    return float(loss.item())


def test_state_goes_from_one_process_to_another_by_order(tmp_path: Path) -> None:
    """Names differ, since the second model is built later; a newcomer has never stepped. Dropout's masks go along."""
    one, model, optimizer, schedule, counter = make(1)
    losses = [step(model, optimizer, schedule, seed) for seed in range(5)]
    counter.state["best"] = losses[-1]
    other, model2, optimizer2, schedule2, counter2 = make(2)
    assert one.layout() == other.layout()
    assert [p.name for p in model.parameters()] != [p.name for p in model2.parameters()]
    arrived = [
        (bucket, to_bytes(source))
        for bucket, source in zip(buckets(other.tensors()), buckets(one.tensors()), strict=True)
    ]
    values = one.save_values()
    expected = [step(model, optimizer, schedule, seed) for seed in range(5, 10)]
    for bucket, data in arrived:
        from_bytes(bucket, data)
    other.load_values(values)
    assert [step(model2, optimizer2, schedule2, seed) for seed in range(5, 10)] == expected
    assert schedule2.last_epoch == 10
    assert counter2.state["best"] == losses[-1]
    assert counter2.state[3] == [1, (2, "x")]
    assert isinstance(counter2.state["mean"], paddle.Tensor)
    assert counter2.state["array"].tolist() == [0, 1, 2]


def test_a_round_that_fails_is_taken_back_whole() -> None:
    """Before and after ``apply``; else a step that comes again has other random numbers, and two decays."""
    tracked, _, optimizer, schedule, counter = make(1)
    large = Counter()
    large.state = {"array": np.zeros(200_000), "count": 0}
    tracked.add(large)
    tracked.begin_round()
    expected = paddle.randn([3]).numpy()
    counter.state["best"], large.state["count"] = 9.0, 1
    counter.state[3].append("changed in place")
    schedule.step()
    schedule.step()
    tracked.keep_round()
    counter.state["best"], large.state["count"] = 10.0, 2
    schedule.step()
    paddle.randn([3])
    tracked.take_back_round()
    assert (schedule.last_epoch, optimizer.get_lr()) == (0, 0.1)
    assert (counter.state["best"], counter.state[3]) == (0.5, [1, (2, "x")])
    assert large.state["count"] == 1, "above 1 MiB: as it was when the step failed"
    np.testing.assert_array_equal(paddle.randn([3]).numpy(), expected)


def test_what_follows_the_last_step_is_taken_back_to_its_end() -> None:
    tracked, _, _, schedule, _ = make(1)
    tracked.begin_round()
    schedule.step()
    tracked.end_round()
    tracked.keep_round()
    schedule.step()
    tracked.take_back_round()
    assert schedule.last_epoch == 1


def test_half_precision_travels_bit_for_bit() -> None:
    tensors = [
        paddle.to_tensor(np.random.RandomState(0).randn(3, 2)).astype(t)
        for t in ("bfloat16", "float16", "int64", "bool")
    ]
    targets = [paddle.zeros([3, 2], str(t.dtype).rpartition(".")[2]) for t in tensors]
    from_bytes(targets, to_bytes(tensors))
    for one, other in zip(tensors, targets, strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes()


def test_large_state_goes_in_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidewright.elastic.tracked.BUCKET_BYTES", 16)
    tensors = [paddle.zeros([n]) for n in (1, 2, 1, 9, 1)]
    assert [len(bucket) for bucket in buckets(tensors)] == [3, 1, 1]


def test_a_gradient_scaler_is_used() -> None:
    """On the CPU it has no effect and no state; that it is found is what can be seen here."""
    tracked, *_ = make(1)
    scaler = paddle.amp.GradScaler(init_loss_scaling=64.0)
    tracked.add(scaler)
    assert tracked.scaler is scaler
    tracked.load_values(tracked.save_values())


@pytest.mark.parametrize("thing", [3, object(), {"a": 1}, lambda: None])
def test_what_has_no_state_is_refused(thing: object) -> None:
    with pytest.raises(ElasticError, match=r"job\.track\(\w+\): has no state_dict"):
        Tracked().add(thing)


# -- a worker that runs alone ---------------------------------------------------------------------------------


def train(
    *, epochs: int = 2, batch: int = 4, layers: int = 3, kill_after: int | None = None
) -> tuple[list[int], Any]:
    paddle.seed(1)
    model = paddle.nn.Linear(layers, 1)
    optimizer = paddle.optimizer.Momentum(0.01, parameters=model.parameters())
    inputs = np.random.RandomState(1).randn(10, layers).astype("float32")
    steps = []
    with join() as job:
        job.track(model, optimizer)
        for step_ in job.steps((inputs,), global_batch=batch, epochs=epochs):
            job.apply(model(step_.inputs).square().sum() / step_.global_batch)
            steps.append(step_.index)
            if kill_after == step_.index:
                raise KeyboardInterrupt
    return steps, model.weight.numpy()


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("TIDE_ADDRESS", raising=False)
    monkeypatch.setenv("TIDE_CHECKPOINT_DIRECTORY", str(tmp_path))
    monkeypatch.setattr("tidewright.elastic.job.CHECKPOINT_EVERY_STEPS", 3)
    return tmp_path


def test_alone_it_goes_on_from_its_own_checkpoint(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(kill_after=4)
    assert [path.name for path in shelf.found_in(alone)] == ["g1-s3"]
    steps, weight = train()
    assert steps == [3, 4, 5]
    monkeypatch.delenv("TIDE_CHECKPOINT_DIRECTORY")
    steps, undisturbed = train()
    assert steps == [0, 1, 2, 3, 4, 5]
    np.testing.assert_array_equal(weight, undisturbed)


@pytest.mark.parametrize(
    ("changed", "text"),
    [({"layers": 4}, "holds other tensors than the script tracks"), ({"batch": 5}, "global_batch = 4, now it is 5")],
)
def test_a_checkpoint_of_another_script_is_refused(alone: Path, changed: dict[str, int], text: str) -> None:
    train()
    with pytest.raises(ElasticError, match=text):
        train(**changed)


def test_a_loop_that_is_broken_out_of_is_complete_and_one_that_raises_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TIDE_ADDRESS", raising=False)
    monkeypatch.setenv("TIDE_MEMBER_DIRECTORY", str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        train(kill_after=2)
    assert '"finished"' not in (tmp_path / "ledger.jsonl").read_text()
    model, optimizer = linear()
    with join() as job:
        job.track(model, optimizer)
        for step_ in job.steps((np.zeros((4, 2), "float32"),), global_batch=1, epochs=9):
            job.apply(model(step_.inputs).sum())
            if step_.index == 2:
                break
    assert '"k":"finished","step":3' in (tmp_path / "ledger.jsonl").read_text()


def test_more_epochs_go_on_where_fewer_ended(alone: Path) -> None:
    train(epochs=2)
    assert train(epochs=3)[0] == [6, 7, 8]


# -- errors that teach ---------------------------------------------------------------------------------------


def linear() -> tuple[Any, Any]:
    model = paddle.nn.Linear(2, 1)
    return model, paddle.optimizer.SGD(0.1, parameters=model.parameters())


def test_misuse_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIDE_ADDRESS", raising=False)
    data = (np.zeros((4, 2), "float32"),)
    model, optimizer = linear()
    with pytest.raises(ElasticError, match=r"with elastic\.join"):
        join().steps(data, global_batch=1, epochs=1)
    with join() as job:
        with pytest.raises(ElasticError, match=r"call job\.track\(model, optimizer\) first"):
            job.steps(data, global_batch=1, epochs=1)
        job.track(model, optimizer)
        with pytest.raises(TypeError, match="global_batch"):
            job.steps(data, epochs=1)  # type: ignore[call-arg]
        with pytest.raises(ElasticError, match="call it once in each round"):
            job.apply(model(paddle.zeros([1, 2])).sum())
        with pytest.raises(ElasticError, match="is none of starting, loading"), job.phase("sleeping"):
            pass
        loop = job.steps(data, global_batch=2, epochs=1)
        step_ = next(loop)
        with pytest.raises(ElasticError, match=r"must be a tensor of one number, got \[2, 1\]"):
            job.apply(model(step_.inputs))
        with pytest.raises(ElasticError, match=r"step\.labels: the dataset has one part only"):
            _ = step_.labels
        with pytest.raises(ElasticError, match="must be tracked before"):
            job.track(model)
        with pytest.raises(ElasticError, match="can be used once"):
            job.steps(data, global_batch=2, epochs=1)
        with pytest.raises(ElasticError, match=r"must call job\.apply\(loss\) once"):
            next(loop)


def test_an_incomplete_environment_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDE_ADDRESS", "127.0.0.1:1")
    for name in ("TIDE_TOKEN", "TIDE_MEMBER", "TIDE_NONCE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ElasticError, match="TIDE_TOKEN is not set, though TIDE_ADDRESS is"):
        Job.from_environment()
    monkeypatch.setenv("TIDE_ADDRESS", "nowhere")
    with pytest.raises(ElasticError, match="must be host:port"):
        Job.from_environment()


def test_a_nan_loss_is_null_in_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIDE_ADDRESS", raising=False)
    monkeypatch.setenv("TIDE_MEMBER_DIRECTORY", str(tmp_path))
    model, optimizer = linear()
    with join() as job:
        job.track(model, optimizer)
        for step_ in job.steps((np.zeros((2, 2), "float32"),), global_batch=2, epochs=1):
            job.apply(model(step_.inputs).sum() * float("nan"))
    assert np.isnan(job.loss)
    assert '"loss":null' in (tmp_path / "ledger.jsonl").read_text()


def test_copies_are_copies() -> None:
    tensors = [paddle.ones([2])]
    kept = copies(tensors)
    tensors[0].set_value(np.zeros(2, "float32"))
    assert kept[0].tolist() == [1, 1]
    set_from(tensors, kept)
    assert tensors[0].tolist() == [1, 1]
