"""Writes the dashboards: ``python deploy/grafana/build.py``. A test keeps the JSON files equal to what this writes.

A dashboard is a list of rows of panels; a panel is a title, a sentence that explains it, a unit and its queries. Panels
of one row share its width. Everything else (ids, grid, colours) is filled in here, the same for all.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "dashboards"
WIDTH = 24
HEIGHT = 8
DATASOURCE = {"type": "prometheus", "uid": "prometheus"}


@dataclass(frozen=True)
class Panel:
    """``queries``: legend and PromQL. ``failure``: stays empty while all is well."""

    title: str
    explanation: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    stacked: bool = False
    failure: bool = False


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


def quantiles(metric: str, selector: str) -> tuple[tuple[str, str], ...]:
    """50th, 90th and 99th percentile of a histogram."""
    return tuple(
        (f"p{percent}", f"histogram_quantile(0.{percent}, sum by (le) (rate({metric}_bucket{{{selector}}}[5m])))")
        for percent in (50, 90, 99)
    )


OVERVIEW = (
    Row(
        "Traffic",
        (
            Panel(
                "Requests by outcome",
                "What the proxy answered. 'abort': the client left. 'error': ours; see the transfer and node boards.",
                "reqps",
                (("{{outcome}}", 'sum by (outcome) (rate(tandem_requests_total{role="proxy"}[5m]))'),),
                stacked=True,
            ),
            Panel(
                "Running and waiting",
                "Requests in work, in queues, and at decode nodes those of them that wait for prefill. The last grows: "
                "too few prefill nodes. Waiting at decode nodes grows beyond it: too few of those.",
                "short",
                (
                    ("{{role}} running", "sum by (role) (tandem_requests_running)"),
                    ("{{role}} waiting", "sum by (role) (tandem_requests_waiting)"),
                    ("decode, waiting for prefill", 'sum(tandem_requests_waiting_for_peer{role="decode"})'),
                ),
            ),
            Panel(
                "Turned away",
                "By the proxy's admission. 'rejected': nothing was spent. 'evicted': it had waited or been worked on.",
                "reqps",
                (("{{reason}}", "sum by (reason) (rate(tandem_requests_dropped_total[5m]))"),),
                stacked=True,
                failure=True,
            ),
            Panel(
                "Tokens",
                "Prompt tokens by where their state came from (only 'computed' cost work), and generated tokens.",
                "short",
                (
                    ("prompt, {{source}}", "sum by (source) (rate(tandem_prompt_tokens_total[5m]))"),
                    ("generated", "sum (rate(tandem_generation_tokens_total[5m]))"),
                ),
            ),
        ),
    ),
    Row(
        "Latency",
        (
            Panel(
                "Time to first token",
                "At the proxy: what clients wait before anything comes.",
                "s",
                quantiles("tandem_request_ttft_seconds", 'role="proxy"'),
            ),
            Panel(
                "Where the first token's time goes",
                "Median of each phase: queueing, computing the prompt, moving it, sampling. Look at the largest.",
                "s",
                (
                    (
                        "{{role}} {{phase}}",
                        "histogram_quantile(0.5, sum by (role, phase, le) "
                        "(rate(tandem_request_phase_seconds_bucket[5m])))",
                    ),
                ),
            ),
            Panel(
                "Time between tokens",
                "On decode nodes. A high p99 beside a low median: prompts are computed between the steps of streams.",
                "s",
                quantiles("tandem_request_itl_seconds", 'role="decode"'),
            ),
        ),
    ),
    Row(
        "Cache and health",
        (
            Panel(
                "Prefix cache hit rate",
                "Share of prompt tokens that were found, by cache group; 'joint' is what all together could use.",
                "percentunit",
                (("{{role}} {{group}}", "avg by (role, group) (instance:tandem_prefix_cache_hit:ratio_rate5m)"),),
            ),
            Panel(
                "Error ratio",
                "Share of requests that ended in an error of ours.",
                "percentunit",
                (("errors", "proxy:tandem_requests:error_ratio_rate5m"),),
                failure=True,
            ),
            Panel(
                "Nodes up",
                "1: the proxy uses the node.",
                "short",
                (("{{node}}", "tandem_node_up"),),
            ),
        ),
    ),
)

CACHE = (
    Row(
        "Pools",
        (
            Panel(
                "KV blocks by state",
                "used: running requests; leased: prompts that a reader fetches; cached: reusable, evictable.",
                "short",
                (("{{role}} {{state}}", "sum by (role, state) (tandem_kv_blocks)"),),
                stacked=True,
            ),
            Panel(
                "State slots by state",
                "Recurrent states. One per running request; the others are checkpoints that prompts resume from.",
                "short",
                (("{{role}} {{state}}", "sum by (role, state) (tandem_state_slots)"),),
                stacked=True,
            ),
            Panel(
                "Occupied share",
                "What a new request could not get. Near 1 requests queue: more --kv-cache-memory or nodes.",
                "percentunit",
                (
                    ("{{instance}} blocks", "instance:tandem_kv_blocks:occupied_ratio"),
                    ("{{instance}} slots", "instance:tandem_state_slots:occupied_ratio"),
                ),
            ),
        ),
    ),
    Row(
        "Hits and losses",
        (
            Panel(
                "Tokens looked up and found",
                "By cache group. The gap between attention and joint is the state's: see lost tokens.",
                "short",
                (
                    ("looked up", "sum (rate(tandem_prefix_cache_query_tokens_total[5m]))"),
                    ("found, {{group}}", "sum by (group) (rate(tandem_prefix_cache_hit_tokens_total[5m]))"),
                ),
            ),
            Panel(
                "Tokens found and computed again",
                "Attention had them, but no state (or no window) to go on from; by reason.",
                "short",
                (("{{reason}}", "sum by (reason) (rate(tandem_prefix_cache_lost_tokens_total[5m]))"),),
            ),
            Panel(
                "Checkpoints",
                "States kept, not kept for want of memory (skipped), and evicted.",
                "short",
                (("{{event}} {{reason}}", "sum by (event, reason) (rate(tandem_checkpoints_total[5m]))"),),
            ),
        ),
    ),
    Row(
        "Pressure",
        (
            Panel(
                "Evictions",
                "Entries that made room, by group. Evictions with a low hit rate: the working set does not fit.",
                "short",
                (("{{group}}", "sum by (group) (rate(tandem_evictions_total[5m]))"),),
            ),
            Panel(
                "Preemptions",
                "Running requests whose memory was taken back. A steady rate: too many sequences at once.",
                "short",
                (("{{instance}}", "sum by (instance) (rate(tandem_preemptions_total[5m]))"),),
            ),
        ),
    ),
)

TRANSFER = (
    Row(
        "Moving prefixes",
        (
            Panel(
                "Payload",
                "Bytes of attention blocks and states that nodes read from others.",
                "Bps",
                (("{{role}} {{kind}}", "sum by (role, kind) (rate(tandem_transfer_bytes_total[5m]))"),),
                stacked=True,
            ),
            Panel(
                "Seconds of a pull",
                "From asking to validated.",
                "s",
                quantiles("tandem_transfer_seconds", 'role=~"prefill|decode"'),
            ),
            Panel(
                "Read while computing",
                "Parts of prompts that were moved while later ones were still computed: what pipelining hides.",
                "short",
                (("{{instance}}", "sum by (instance) (rate(tandem_transfer_early_parts_total[5m]))"),),
            ),
            Panel(
                "Memory ranges in a pull",
                "Neighbouring blocks are read as one. Many ranges: the holder's pool is fragmented.",
                "short",
                quantiles("tandem_transfer_descriptors", 'role=~"prefill|decode"'),
            ),
        ),
    ),
    Row(
        "Promises",
        (
            Panel(
                "Leases",
                "Computed prompts that wait to be read.",
                "short",
                (("{{instance}} {{state}}", "sum by (instance, state) (tandem_leases)"),),
            ),
            Panel(
                "Questions by content",
                "Nodes that asked others for a prefix they may have (turn two goes back to a prefill node), by result.",
                "short",
                (("{{role}} {{result}}", "sum by (role, result) (rate(tandem_source_queries_total[5m]))"),),
            ),
            Panel(
                "Leases that ran out",
                "Prompts computed for nobody: readers died, hung, or did not renew for --kv-lease-seconds.",
                "short",
                (("{{instance}}", "sum by (instance) (rate(tandem_leases_expired_total[5m]))"),),
            ),
        ),
    ),
    Row(
        "When it fails",
        (
            Panel(
                "Pulls that gave nothing",
                "By reason. The prompt is computed again, or the request fails typed: never a wrong answer.",
                "short",
                (("{{role}} {{reason}}", "sum by (role, reason) (rate(tandem_transfer_failures_total[5m]))"),),
                failure=True,
            ),
            Panel(
                "Late reads thrown away",
                "The memory had been reused when it was read; found by its generation.",
                "short",
                (("{{instance}}", "sum by (instance) (rate(tandem_late_reads_rejected_total[5m]))"),),
            ),
            Panel(
                "Quarantine",
                "Memory that a read may still write. It must go back to 0.",
                "short",
                (
                    ("{{instance}} blocks", 'sum by (instance) (tandem_kv_blocks{state="quarantined"})'),
                    ("{{instance}} slots", 'sum by (instance) (tandem_state_slots{state="quarantined"})'),
                    ("{{instance}} new agents", "sum by (instance) (increase(tandem_agent_recreations_total[5m]))"),
                ),
            ),
        ),
    ),
)

NODES = (
    Row(
        "Nodes",
        (
            Panel("Up", "1: the proxy uses the node.", "short", (("{{node}}", "tandem_node_up"),)),
            Panel(
                "Versions",
                "Nodes of one service should run the same.",
                "short",
                (("{{role}} {{instance}} tandem {{version}} torch {{torch}}", "tandem_build_info"),),
            ),
            Panel(
                "Placement",
                "remote: a prefill node computed the prompt. local: the decode node did.",
                "reqps",
                (
                    (
                        "{{policy}} {{placement}}",
                        "sum by (policy, placement) (rate(tandem_proxy_decisions_total[5m]))",
                    ),
                ),
                stacked=True,
            ),
            Panel(
                "First token, estimated",
                "What placement expected of streams, median: how long their first byte would take.",
                "s",
                (
                    (
                        "{{placement}}",
                        "histogram_quantile(0.5, sum by (placement, le) "
                        "(rate(tandem_proxy_predicted_ttft_seconds_bucket[5m])))",
                    ),
                ),
            ),
            Panel(
                "First token, actual over estimated",
                "1: placement knows what it does. Far from it for one way only: the other is chosen too often.",
                "short",
                (
                    (
                        "{{placement}} p50",
                        "histogram_quantile(0.5, sum by (placement, le) (rate(tandem_proxy_ttft_ratio_bucket[5m])))",
                    ),
                    (
                        "{{placement}} p90",
                        "histogram_quantile(0.9, sum by (placement, le) (rate(tandem_proxy_ttft_ratio_bucket[5m])))",
                    ),
                ),
            ),
        ),
    ),
    Row(
        "What the proxy knows",
        (
            Panel(
                "Prefix index",
                "Blocks and checkpoints of each node's cache that placement knows.",
                "short",
                (("{{node}}", "tandem_prefix_index_entries"),),
            ),
            Panel(
                "Snapshots",
                "Caches read as a whole: one per life of a node; more means that the proxy falls behind the events.",
                "short",
                (("{{instance}}", "sum by (instance) (increase(tandem_prefix_index_snapshots_total[5m]))"),),
            ),
            Panel(
                "Tokenised",
                "Prompts turned into token ids. The proxy should do it: nodes do what it could not.",
                "reqps",
                (("{{role}} {{instance}}", "sum by (role, instance) (rate(tandem_prompts_tokenised_total[5m]))"),),
                stacked=True,
            ),
        ),
    ),
    Row(
        "Failures seen by the proxy",
        (
            Panel(
                "Circuit breakers",
                "0 closed, 1 half-open (one leg probes the node), 2 open: its legs failed several times in a row.",
                "short",
                (("{{node}}", "tandem_breaker_state"),),
            ),
            Panel(
                "Breakers opened",
                "How often a node's breaker opened in five minutes.",
                "short",
                (("{{node}}", "increase(tandem_breaker_opened_total[5m])"),),
            ),
            Panel(
                "Retries and migrations",
                "Legs sent again before the first byte; refused: the budget was spent; streams that broke later.",
                "reqps",
                (
                    ("retry {{reason}}", "sum by (reason) (rate(tandem_proxy_retries_total[5m]))"),
                    ("retry refused", "sum(rate(tandem_proxy_retries_refused_total[5m]))"),
                    ("stream {{outcome}}", "sum by (outcome) (rate(tandem_proxy_migrations_total[5m]))"),
                ),
                failure=True,
            ),
        ),
    ),
    Row(
        "Load by node",
        (
            Panel("Running", "Requests in work.", "short", (("{{instance}}", "tandem_requests_running"),)),
            Panel(
                "Waiting for this node",
                "Requests in its queue, without those whose prompt another node still computes.",
                "short",
                (("{{instance}}", "tandem_requests_waiting - tandem_requests_waiting_for_peer"),),
            ),
            Panel(
                "Tokens computed",
                "Prompt tokens computed and tokens generated by each node: is the work spread evenly?",
                "short",
                (
                    (
                        "{{instance}} prompt",
                        'sum by (instance) (rate(tandem_prompt_tokens_total{source="computed"}[5m]))',
                    ),
                    ("{{instance}} generated", "sum by (instance) (rate(tandem_generation_tokens_total[5m]))"),
                ),
            ),
        ),
    ),
    Row(
        "Requests by node",
        (
            Panel(
                "Whole requests, median",
                "From arrival to the last token, on each process.",
                "s",
                (
                    (
                        "{{instance}}",
                        "histogram_quantile(0.5, sum by (instance, le) (rate(tandem_request_e2e_seconds_bucket[5m])))",
                    ),
                ),
            ),
            Panel(
                "Queueing, p90",
                "Seconds between arrival at a node and the first step.",
                "s",
                (
                    (
                        "{{instance}}",
                        "histogram_quantile(0.9, sum by (instance, le) "
                        '(rate(tandem_request_phase_seconds_bucket{phase="queue"}[5m])))',
                    ),
                ),
            ),
        ),
    ),
)

DASHBOARDS = {
    "tandem-overview": ("Tandem: overview", OVERVIEW),
    "tandem-cache": ("Tandem: cache", CACHE),
    "tandem-transfer": ("Tandem: transfer", TRANSFER),
    "tandem-nodes": ("Tandem: nodes", NODES),
}


def build(uid: str) -> dict[str, Any]:
    """One dashboard as Grafana (schema 38, version 10 and later) reads it."""
    title, rows = DASHBOARDS[uid]
    panels: list[dict[str, Any]] = []
    top = 0
    for row in rows:
        panels.append(
            {
                "type": "row",
                "id": len(panels) + 1,
                "title": row.title,
                "collapsed": False,
                "gridPos": {"h": 1, "w": WIDTH, "x": 0, "y": top},
                "panels": [],
            }
        )
        top += 1
        width = WIDTH // len(row.panels)
        for column, panel in enumerate(row.panels):
            position = {"h": HEIGHT, "w": width, "x": column * width, "y": top}
            panels.append(_timeseries(panel, len(panels) + 1, position))
        top += HEIGHT
    return {
        "uid": uid,
        "title": title,
        "tags": ["tandem"],
        "schemaVersion": 38,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "links": [
            {
                "type": "dashboards",
                "title": "Tandem",
                "tags": ["tandem"],
                "asDropdown": False,
                "includeVars": False,
                "keepTime": True,
            }
        ],
        "templating": {"list": []},
        "annotations": {"list": []},
        "panels": panels,
    }


def _timeseries(panel: Panel, panel_id: int, position: dict[str, int]) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "id": panel_id,
        "title": panel.title,
        "description": panel.explanation,
        "datasource": DATASOURCE,
        "gridPos": position,
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "noValue": "none" if panel.failure else "no data",
                "custom": {
                    "drawStyle": "line",
                    "lineWidth": 1,
                    "fillOpacity": 30 if panel.stacked else 5,
                    "showPoints": "never",
                    "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
                },
            },
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": expr, "legendFormat": legend}
            for index, (legend, expr) in enumerate(panel.queries)
        ],
    }


def render(uid: str) -> str:
    return json.dumps(build(uid), indent=2) + "\n"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for uid in DASHBOARDS:
        (FOLDER / f"{uid}.json").write_text(render(uid))


if __name__ == "__main__":
    main()
