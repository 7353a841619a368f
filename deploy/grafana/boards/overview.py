"""What goes through the service, how long clients wait, whether all is well."""

from __future__ import annotations

from panels import Panel, Row, quantiles

ROWS = (
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
        "Targets",
        (
            Panel(
                "Targets kept",
                "Share of streams in time: 'ttft', the first token; 'itl', the mean time between two. Shed ones count.",
                "percentunit",
                (
                    (
                        "{{target}}",
                        'sum by (target) (rate(tandem_proxy_targets_total{kept="yes"}[5m]))'
                        " / sum by (target) (rate(tandem_proxy_targets_total[5m]))",
                    ),
                ),
            ),
            Panel(
                "Nodes that the load asks for",
                "By role, as the proxies reckon from the last minute's prompts and tokens. For an autoscaler.",
                "short",
                (
                    ("prefill", 'sum(tandem_proxy_recommended_nodes{node_role="prefill"})'),
                    ("decode", 'max(tandem_proxy_recommended_nodes{node_role="decode"})'),
                ),
            ),
            Panel(
                "Time in steps",
                "Share of the engines' time: 'prompt', steps with prompt tokens; 'decode', steps that only generate.",
                "percentunit",
                (("{{role}} {{kind}}", "avg by (role, kind) (rate(tandem_step_seconds_total[5m]))"),),
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
                "1: the node answers, also while it drains.",
                "short",
                (("{{node}}", "tandem_node_up"),),
            ),
        ),
    ),
)
