"""Prefixes that move between nodes, what is held for readers, and what fails."""

from __future__ import annotations

from panels import Panel, Row, quantiles

ROWS = (
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
                "Reads in flight",
                "Pulls whose data is being read, or may still be written. One that never ends is a frozen peer's.",
                "short",
                (("{{instance}}", "sum by (instance) (tandem_transfers_in_flight)"),),
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
