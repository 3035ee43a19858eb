"""Prometheus' own tool reads our files, and each alert rule fires when it must and only then."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from shared.testing.prometheus import prometheus_program

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
SERVICES = ("intake", "queueing", "metrics", "scaling", "execution")
EVERYBODY_UP = {f'up{{job="{service}"}}': "1x60" for service in SERVICES}
QUIET = {
    **EVERYBODY_UP,
    'tidewright_intake_ready_info{job="intake"}': "1x60",
    'tidewright_queueing_lease_held_info{job="queueing",instance="a"}': "1x60",
    'tidewright_queueing_lease_held_info{job="queueing",instance="b"}': "0x60",
    'tidewright_queueing_oldest_unread_seconds{job="queueing"}': "0 3 9 0x57",
    'tidewright_scaling_relay_oldest_unsent_seconds{job="scaling"}': "0 0.2x59",
    'tidewright_scaling_relay_held_info{job="scaling"}': "1x60",
    'tidewright_intake_relay_held_info{job="intake"}': "0x60",
    'tidewright_intake_quarantined_records_total{job="intake",cause="undecodable"}': "2x60",
    'tidewright_scaling_oldest_transaction_seconds{job="scaling"}': "0 4 8 0 4 8 0x54",
    'tidewright_metrics_handler_failures_total{job="metrics",kind="Conflict"}': "0 1 1x58",
    'tidewright_intake_http_request_seconds_count{job="intake",status="201"}': "0+9x60",
}
SEEN = "5m"
"""60 samples, one every 5 s."""

LOUD = {
    "ServiceGone": {'up{job="scaling"}': "1x9 0x51"},
    "NotReady": {'tidewright_intake_ready_info{job="intake"}': "1x9 0x51"},
    "NoActiveHolder": {'tidewright_queueing_lease_held_info{job="queueing",instance="a"}': "1x9 0x51"},
    "ConsumerBehind": {'tidewright_queueing_oldest_unread_seconds{job="queueing"}': "0+5x60"},
    "RelayBehind": {'tidewright_scaling_relay_oldest_unsent_seconds{job="scaling"}': "0+5x60"},
    "NoRelay": {'tidewright_scaling_relay_held_info{job="scaling"}': "1x9 0x51"},
    "RecordsSetAside": {'tidewright_intake_quarantined_records_total{job="intake",cause="undecodable"}': "0x30 1x30"},
    "TransactionOpenForLong": {'tidewright_scaling_oldest_transaction_seconds{job="scaling"}': "0+5x60"},
    "HandlerFails": {'tidewright_metrics_handler_failures_total{job="metrics",kind="Conflict"}': "0+1x60"},
    "DoorRefuses": {'tidewright_intake_http_request_seconds_count{job="intake",status="429"}': "0+2x60"},
}


def promtool(*arguments, folder):
    done = subprocess.run(
        [prometheus_program("promtool"), *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    return done.returncode, f"{done.stdout}{done.stderr}"


@pytest.fixture
def folder(tmp_path):
    """As the container sees it: the configuration, and the rules below it."""
    shutil.copytree(DEPLOY / "prometheus", tmp_path, dirs_exist_ok=True)
    shutil.copytree(DEPLOY / "alerts", tmp_path / "alerts")
    return tmp_path


def test_prometheus_takes_the_configuration_and_finds_the_rules(folder):
    code, said = promtool("check", "config", "prometheus.yml", folder=folder)
    assert code == 0, said
    assert f"SUCCESS: {len(LOUD)} rules found" in said
    (folder / "prometheus.yml").write_text("scrape_configs: [{job_name: a, dns_sd_configs: [{name: b}]}]")
    assert promtool("check", "config", "prometheus.yml", folder=folder)[0] != 0


def cases(folder, chosen):
    """A file for ``promtool test rules``: series that change, and which alerts fire at their end."""
    tests = [
        {
            "name": alert or "quiet",
            "interval": "5s",
            "input_series": [{"series": s, "values": v} for s, v in {**QUIET, **LOUD.get(alert, {})}.items()],
            "promql_expr_test": [
                {
                    "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                    "eval_time": SEEN,
                    "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in expected],
                }
            ],
        }
        for alert, expected in chosen.items()
    ]
    path = folder / "cases.yml"
    path.write_text(yaml.safe_dump({"rule_files": ["alerts/tidewright.yml"], "tests": tests}))
    return path


def test_each_alert_fires_when_it_must_and_no_other_does(folder):
    path = cases(folder, {"": (), **{alert: (alert,) for alert in LOUD}})
    code, said = promtool("test", "rules", path.name, folder=folder)
    assert code == 0, said


def test_the_tool_notices_an_alert_that_does_not_fire(folder):
    """Whether the test above can fail."""
    code, said = promtool("test", "rules", cases(folder, {"": ("NotReady",)}).name, folder=folder)
    assert code != 0, said


def test_every_alert_is_tried_and_names_a_section_of_the_operations_page():
    rules = yaml.safe_load((DEPLOY / "alerts" / "tidewright.yml").read_text())["groups"][0]["rules"]
    assert {rule["alert"] for rule in rules} == set(LOUD)
    page = (DEPLOY.parent / "docs" / "operations.md").read_text()
    for rule in rules:
        where, _, section = rule["annotations"]["runbook"].partition(", ")
        assert where == "docs/operations.md"
        assert f"## {section.strip(chr(34))}\n" in page, section
