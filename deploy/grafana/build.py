"""Writes the dashboards: ``python deploy/grafana/build.py``. A test keeps the JSON files equal to what this writes.

A dashboard is a list of rows of panels (``boards``); a panel is a title, a sentence that explains it, a unit and its
queries. Panels of one row share its width. Everything else (ids, grid, colours) is filled in here, the same for all.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from boards import cache, nodes, overview, transfer
from panels import Panel

FOLDER = Path(__file__).parent / "dashboards"
WIDTH = 24
HEIGHT = 8
DATASOURCE = {"type": "prometheus", "uid": "prometheus"}

DASHBOARDS = {
    "tandem-overview": ("Tandem: overview", overview.ROWS),
    "tandem-cache": ("Tandem: cache", cache.ROWS),
    "tandem-transfer": ("Tandem: transfer", transfer.ROWS),
    "tandem-nodes": ("Tandem: nodes", nodes.ROWS),
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
