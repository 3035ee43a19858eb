"""Log lines, trace headers and instruments."""

import io
import json
import logging

import pytest

from shared.telemetry.instruments import Instruments
from shared.telemetry.logs import configure_logging, get_logger
from shared.telemetry.trace import current_trace, new_trace, parse_traceparent, use_trace

HEADER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def lines_of(level: str = "info", log_format: str = "json") -> io.StringIO:
    stream = io.StringIO()
    configure_logging(level=level, log_format=log_format, stream=stream)
    return stream


def test_a_line_is_one_object_with_message_fields_time_and_trace() -> None:
    stream = lines_of()
    trace = new_trace()
    with use_trace(trace):
        get_logger(service="scaling").info("gang_admitted", job_id="j1", epoch=3)
    (line,) = stream.getvalue().splitlines()
    found = json.loads(line)
    assert found.pop("time").endswith("Z")
    assert found == {
        "event": "gang_admitted",
        "service": "scaling",
        "job_id": "j1",
        "epoch": 3,
        "level": "info",
        "trace_id": trace.trace_id,
    }


def test_lines_below_the_level_are_left_out() -> None:
    stream = lines_of("warning")
    get_logger().info("quiet")
    logging.getLogger("other").info("quiet")
    get_logger().warning("loud")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["loud"]


def test_the_standard_librarys_records_look_the_same() -> None:
    stream = lines_of()
    logging.getLogger("somebody").warning("%s happened", "it")
    found = json.loads(stream.getvalue())
    assert (found["event"], found["level"]) == ("it happened", "warning")


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_traceback_shows_no_local_variables(log_format: str) -> None:
    stream = lines_of(log_format=log_format)
    password = "".join(["hun", "ter2"])
    try:
        raise ValueError(f"{len(password)} characters")
    except ValueError as exc:
        get_logger().error("failed", exc_info=exc)
    assert "ValueError" in stream.getvalue()
    assert "7 characters" in stream.getvalue()
    assert "hunter2" not in stream.getvalue()


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "nonsense",
        HEADER.upper(),
        HEADER + "-more",
        "ff" + HEADER[2:],
        HEADER.replace("4bf92f3577b34da6a3ce929d0e0e4736", "0" * 32),
        HEADER.replace("00f067aa0ba902b7", "0" * 16),
        "00-" + "a" * 600,
    ],
)
def test_a_bad_traceparent_is_ignored(text: str | None) -> None:
    assert parse_traceparent(text) is None


def test_a_traceparent_survives_and_a_later_version_may_carry_more() -> None:
    assert str(parse_traceparent(HEADER)) == HEADER
    later = parse_traceparent("01" + HEADER[2:] + "-more")
    assert later is not None
    child = later.child()
    assert (child.trace_id, child.span_id == later.span_id) == (later.trace_id, False)


def test_a_trace_ends_with_its_block() -> None:
    before = current_trace()
    with use_trace(new_trace()) as _, use_trace(None):
        assert current_trace() is None
    assert current_trace() is before


def test_two_services_have_registries_of_their_own_and_one_name_is_one_instrument() -> None:
    scaling, intake = Instruments("scaling"), Instruments("intake")
    jobs = scaling.counter("jobs_total", "Jobs.", ("reason",))
    assert scaling.counter("jobs_total", "Jobs.", ("reason",)) is jobs
    jobs.labels("GREW").inc()
    assert b'tidewright_scaling_jobs_total{reason="GREW"} 1.0' in scaling.render()
    assert b"jobs_total" not in intake.render()


def test_a_name_without_its_unit_or_of_another_kind_is_a_mistake() -> None:
    instruments = Instruments("scaling")
    instruments.gauge("room_bytes", "Room.")
    for make in (
        lambda: instruments.counter("jobs", "Jobs."),
        lambda: instruments.histogram("latency", "Latency."),
        lambda: instruments.counter("room_bytes", "Room."),
        lambda: instruments.histogram("room_bytes", "Room."),
    ):
        with pytest.raises(AssertionError):
            make()


def test_what_every_service_must_have_is_there() -> None:
    text = Instruments("scaling").render().decode()
    for name in (
        "consumer_lag_events",
        "handler_seconds",
        "oldest_unread_seconds",
        "decisions_total",
        "fenced_writes_total",
        "quarantined_records_total",
    ):
        assert f"tidewright_scaling_{name}" in text, name
