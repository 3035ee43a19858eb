"""Prometheus finds every service where compose puts it, and the dashboard's panels have what they show."""

import json
import re
from itertools import combinations
from pathlib import Path

import yaml

from services.launch.compose import read_compose
from tests.acceptance.panels import PANELS, alert_expressions, names_in

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = read_compose(ROOT / "docker-compose.yml", {"TIDE_POSTGRES_PASSWORD": "x"})
SERVICES = ("intake", "queueing", "metrics", "scaling", "execution")


def test_prometheus_looks_for_each_service_where_it_listens():
    configured = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    found = {
        job["job_name"]: (job["dns_sd_configs"][0]["names"], job["dns_sd_configs"][0]["port"]) for job in configured
    }
    wanted = {}
    for name in SERVICES:
        service = COMPOSE[name]
        host = (service.network_mode or name).removeprefix("service:")
        wanted[name] = ([host], int(service.environment[f"TIDE_{name.upper()}_PORT"]))
    assert found == wanted
    assert {job["dns_sd_configs"][0]["type"] for job in configured} == {"A"}


def test_the_files_of_prometheus_and_grafana_are_mounted_where_they_are_looked_for():
    mounts = {
        mount.target: Path(mount.source) for name in ("prometheus", "grafana") for mount in COMPOSE[name].mounts
    }
    assert (mounts["/etc/prometheus"] / "prometheus.yml").exists()
    assert list(mounts["/etc/prometheus/alerts"].glob("*.yml"))
    provisioning = mounts["/etc/grafana/provisioning"]
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    host, _, port = source["url"].removeprefix("http://").partition(":")
    assert host in COMPOSE
    assert any(published.endswith(f":{port}") for published in COMPOSE[host].ports)
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "tidewright.yml").read_text())["providers"]
    assert (mounts[provider["options"]["path"]] / "tidewright.json").exists()
    home = COMPOSE["grafana"].environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/tidewright.json"
    board = json.loads((ROOT / "deploy" / "dashboards" / "tidewright.json").read_text())
    used = {panel["datasource"]["uid"] for panel in board["panels"] if "datasource" in panel}
    assert used == {source["uid"]}


def test_panels_have_names_places_and_expressions_of_their_own():
    board = json.loads((ROOT / "deploy" / "dashboards" / "tidewright.json").read_text())["panels"]
    assert len({panel["id"] for panel in board}) == len(board)
    assert len({panel["title"] for panel in board}) == len(board)
    for one, other in combinations([panel["gridPos"] for panel in board], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above, (one, other)
    for panel in PANELS:
        assert panel.expression
        legend = set(re.findall(r"\{\{(\w+)\}\}", panel.legend))
        grouped = re.search(r"by \(([^)]*)\)", panel.expression)
        kept = set(re.split(r",\s*", grouped[1])) - {"le"} if grouped else {"job", "instance"}
        assert legend <= kept, panel


def test_names_are_found_in_expressions():
    assert names_in('sum by (job) (rate(tidewright_a_b_bucket{le="1"}[1m])) > 0') == {"tidewright_a_b"}
    assert names_in('{__name__=~"tidewright_[a-z]+_(a|b)_total"}') == {
        "tidewright_[a-z]+_a_total",
        "tidewright_[a-z]+_b_total",
    }
    assert names_in("process_cpu_seconds_total") == {"process_cpu_seconds_total"}
    assert len(alert_expressions()) > 5
