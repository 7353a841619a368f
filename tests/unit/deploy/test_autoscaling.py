"""Which pool the autoscalers grow: the adapter's queries, evaluated by promtool, against the scalers' targets."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
KUBERNETES = ROOT / "deploy" / "kubernetes"
ROLES = ("prefill", "decode")
Series = Mapping[str, float]


@dataclass(frozen=True)
class Situation:
    """``grows``: the roles that are short. Gauges by name and labels; counters as their growth per second."""

    grows: tuple[str, ...]
    prefill: Series
    decode: Series


IDLE: Series = {
    "tandem_requests_waiting": 0,
    "tandem_requests_waiting_for_peer": 0,
    'tandem_kv_blocks{state="free"}': 90,
    'tandem_kv_blocks{state="used"}': 10,
    'tandem_kv_blocks{state="leased"}': 0,
    'tandem_state_slots{state="free"}': 9,
    'tandem_state_slots{state="leased"}': 0,
}
RATES: Series = {
    'tandem_request_itl_seconds_bucket{le="0.1"}': 100,
    "tandem_request_itl_seconds_count": 100,
    "tandem_generation_tokens_total": 100,
    'tandem_prompt_tokens_total{source="computed"}': 10,
}
SLOW_GAPS = {'tandem_request_itl_seconds_bucket{le="0.1"}': 50.0}
NOTHING = dict.fromkeys(RATES, 0.0)
COMPUTES = {'tandem_prompt_tokens_total{source="computed"}': 5000.0}
LEASED = {'tandem_state_slots{state="free"}': 1.0, 'tandem_state_slots{state="leased"}': 8.0}
FULL = {'tandem_kv_blocks{state="free"}': 20.0, 'tandem_kv_blocks{state="used"}': 80.0}
NO_BLOCKS = dict.fromkeys((name for name in IDLE if name.startswith("tandem_kv_blocks")), 0.0)
NO_SLOTS = dict.fromkeys((name for name in IDLE if name.startswith("tandem_state_slots")), 0.0)


def waiting(num: int, *, for_peer: int = 0) -> Series:
    return {"tandem_requests_waiting": num, "tandem_requests_waiting_for_peer": for_peer}


SITUATIONS = {
    "nothing happens": Situation((), NOTHING, NOTHING),
    "all is well": Situation((), {}, {}),
    "prompts queue, their answers wait for them": Situation(("prefill",), waiting(9), waiting(9, for_peer=9)),
    "prompts queue, decode nodes help out and stutter": Situation(
        ("prefill",), waiting(9), {**waiting(9, for_peer=9), **SLOW_GAPS, **COMPUTES}
    ),
    "finished prompts wait for decode nodes": Situation(("decode",), {**waiting(9), **LEASED}, waiting(9)),
    "decode memory is held": Situation(("decode",), {}, FULL),
    "gaps grow": Situation(("decode",), {}, SLOW_GAPS),
    "prompts queue, the model has no attention": Situation(
        ("prefill",), {**waiting(9), **NO_BLOCKS}, {**waiting(9, for_peer=9), **NO_BLOCKS}
    ),
    "prompts queue, the model has attention only": Situation(
        ("prefill",), {**waiting(9), **NO_SLOTS}, {**waiting(9, for_peer=9), **NO_SLOTS}
    ),
    "both are short": Situation(("prefill", "decode"), waiting(9), waiting(18, for_peer=9)),
}


def adapter_queries(pod: str) -> dict[str, str]:
    """What the adapter asks Prometheus for one pod."""
    rules = yaml.safe_load((KUBERNETES / "monitoring" / "adapter-rules.yaml").read_text())["rules"]
    queries = {}
    for rule in rules:
        text = rule["metricsQuery"].replace("<<.Series>>", rule["seriesQuery"].partition("{")[0])
        text = text.replace("<<.LabelMatchers>>", f'namespace="tandem", pod="{pod}"').replace("<<.GroupBy>>", "pod")
        queries[rule["name"]["as"]] = " ".join(text.split())
    return queries


def targets() -> dict[str, dict[str, float]]:
    """Role -> metric -> what a pod may have on average."""
    path = KUBERNETES / "overlays" / "autoscaling" / "hpa.yaml"
    found: dict[str, dict[str, float]] = {}
    for scaler in yaml.safe_load_all(path.read_text()):
        metrics = [entry["pods"] for entry in scaler["spec"]["metrics"]]
        found[scaler["metadata"]["name"].removeprefix("tandem-")] = {
            each["metric"]["name"]: quantity(each["target"]["averageValue"]) for each in metrics
        }
    return found


def quantity(text: str) -> float:
    return float(text.removesuffix("m")) / (1000 if text.endswith("m") else 1)


def series_of(role: str, changes: Series) -> list[dict[str, str]]:
    series = []
    for name, value in {**IDLE, **RATES, **changes}.items():
        bare, _, labels = name.partition("{")
        own = f'namespace="tandem", pod="tandem-{role}-0", role="{role}"'
        values = f"0+{15 * value:g}x40" if name in RATES else f"{value:g}x40"
        series.append({"series": f"{bare}{{{own}{', ' + labels if labels else '}'}", "values": values})
    return series


@pytest.mark.parametrize("name", SITUATIONS)
def test_scalers_when_one_role_is_short_then_only_that_one_grows(name: str, tmp_path: Path) -> None:
    situation = SITUATIONS[name]
    checks: list[dict[str, Any]] = []
    for role, metrics in targets().items():
        queries = adapter_queries(f"tandem-{role}-0")
        # One number for a role: how many of its signals are above their targets. Each has to have a value.
        above = [f"(({queries[metric]}) > bool {target})" for metric, target in metrics.items()]
        known = [f"count(({queries[metric]}) >= 0)" for metric in metrics]  # what is no number is not
        checks.append(
            {"expr": f"clamp_max({' + '.join(above)}, 1)", "value": float(role in situation.grows), "role": role}
        )
        checks.append({"expr": " + ".join(known), "value": len(metrics), "role": ""})
    evaluate([*series_of("prefill", situation.prefill), *series_of("decode", situation.decode)], checks, tmp_path)


def test_load_when_two_proxies_reckon_then_keda_asks_for_prompts_of_both_and_streams_once(tmp_path: Path) -> None:
    reckoned = {("tandem", "prefill"): (2.2, 2.6), ("tandem", "decode"): (4, 3), ("other", "prefill"): (9, 9)}
    series = [
        {
            "series": f'tandem_proxy_recommended_nodes{{namespace="{space}", node_role="{role}", pod="proxy-{index}"}}',
            "values": f"{count}x40",
        }
        for (space, role), counts in reckoned.items()
        for index, count in enumerate(counts)
    ]
    path = KUBERNETES / "overlays" / "keda" / "scaledobjects.yaml"
    checks = []
    for scaler, pods in zip(yaml.safe_load_all(path.read_text()), (5, 4), strict=True):
        [trigger] = scaler["spec"]["triggers"]
        assert (trigger["metricType"], trigger["metadata"]["threshold"]) == ("AverageValue", "1"), "a pod for each"
        checks.append({"expr": trigger["metadata"]["query"], "value": pods, "role": ""})
    evaluate(series, checks, tmp_path)


def evaluate(series: list[dict[str, str]], checks: list[dict[str, Any]], folder: Path) -> None:
    """``checks``: each an expression, its one value, and the role whose first pod it is labelled with, or none."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    document = {
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "15s",
                "input_series": series,
                "promql_expr_test": [
                    {
                        "expr": check["expr"],
                        "eval_time": "9m",
                        "exp_samples": [
                            {
                                "labels": f'{{pod="tandem-{check["role"]}-0"}}' if check["role"] else "{}",
                                "value": check["value"],
                            }
                        ],
                    }
                    for check in checks
                ],
            }
        ],
    }
    (folder / "test.yml").write_text(yaml.safe_dump(document))
    command = ["promtool", "test", "rules", "test.yml"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
