"""A report is refused with the field that is wrong, or it is sound."""

import pytest
from unit.metrics_builders import S, make_sample

from schemas.vocabulary import UtilisationMeasure
from services.metrics.core.signals import fault_of


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("member", {"member": "j2/worker/0/1"}),
        ("member", {"member": "j1/server/0/1"}),
        ("member", {"member": "j1/worker/0"}),
        ("member", {"member": "j1/worker/0/1/2"}),
        ("member", {"member": "j1/worker/x/1"}),
        ("member", {"member": "j1/worker/-1/1"}),
        ("rank", {"rank": 2, "member": "j1/worker/2/1"}),
        ("world", {"world": 101}),
        ("wall_seconds", {"wall_us": 0, "step_us": 0, "sync_us": 0, "input_wait_us": 0}),
        ("wall_seconds", {"wall_us": 120 * S + 1}),
        ("wall_seconds", {"step_us": 2 * S}),
        ("wall_seconds", {"step_us": 400_000, "sync_us": 400_000, "input_wait_us": 400_000}),
        ("step", {"step": 1_001}),
        ("utilisation", {"measure": UtilisationMeasure.NVML}),
    ],
)
def test_contradictions_name_their_field(field, changes):
    fault = fault_of(make_sample(**changes), wall_us_max=120 * S, world_max=100)
    assert fault is not None
    assert fault.field == field
    assert fault.way_out


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"step_us": 720_000},  # 20 ms over: clocks are read one by one
        {"total_steps": None, "step": 10**9},
        {"loss": None},
        {"rank": 1, "world": 2},
        {"measure": UtilisationMeasure.NVML, "utilisation_ppm": 0},
    ],
)
def test_sound_reports_pass(changes):
    assert fault_of(make_sample(**changes), wall_us_max=120 * S, world_max=100) is None
