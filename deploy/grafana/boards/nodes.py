"""Each node: its load, what the proxy knows of it and thinks of it."""

from __future__ import annotations

from panels import Panel, Row

ROWS = (
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
            Panel(
                "Event loop's lag",
                "99th percentile of how late the event loop wakes for its own work: all else in the process waits.",
                "s",
                (
                    (
                        "{{role}} {{instance}}",
                        "histogram_quantile(0.99, sum by (role, instance, le) "
                        '(rate(tandem_event_loop_lag_seconds_bucket{cause="own"}[5m])))',
                    ),
                ),
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
    Row(
        "Structured output",
        (
            Panel(
                "Grammars",
                "Tried before any prompt is computed, by result; how many are tried or compiled now, or wait for it. "
                "Bad ones are the clients'.",
                "short",
                (
                    ("{{role}} {{result}} /s", "sum by (role, result) (rate(tandem_grammar_checks_total[5m]))"),
                    ("{{role}} waiting", "sum by (role) (tandem_grammars_waiting)"),
                ),
            ),
            Panel(
                "Time of grammars",
                "p99 of trying one, of compiling one (beside the prompt's way), and of a step's masks (beside its "
                "forward: longer than a step, they slow it down).",
                "s",
                tuple(
                    (
                        name,
                        f"histogram_quantile(0.99, sum by (le) (rate(tandem_grammar_{name}_seconds_bucket[5m])))",
                    )
                    for name in ("check", "compile", "mask")
                ),
            ),
            Panel(
                "Unknown fields",
                "Fields of requests that nobody here knows: they change nothing. The log names the first hundred.",
                "short",
                (("{{route}} /s", 'sum by (route) (rate(tandem_unknown_fields_total{role="proxy"}[5m]))'),),
            ),
        ),
    ),
    Row(
        "Speculative decoding",
        (
            Panel(
                "Drafted tokens",
                "Run behind the last token, and taken because they equal what was sampled. Empty without "
                "--speculative-config.",
                "short",
                (
                    ("drafted /s", "sum (rate(tandem_spec_decode_num_draft_tokens_total[5m]))"),
                    ("taken /s", "sum (rate(tandem_spec_decode_num_accepted_tokens_total[5m]))"),
                ),
            ),
            Panel(
                "Tokens taken of a draft",
                "Mean per draft: a step of a sequence brings this many and one. Near 0 drafts cost more than they "
                "bring, and are tried rarely.",
                "short",
                (
                    (
                        "{{instance}}",
                        "sum by (instance) (rate(tandem_spec_decode_num_accepted_tokens_total[5m])) "
                        "/ sum by (instance) (rate(tandem_spec_decode_num_drafts_total[5m]))",
                    ),
                ),
            ),
            Panel(
                "Taken by place",
                "Tokens a second at each place of a draft: how long drafts are worth being.",
                "short",
                (
                    (
                        "place {{position}}",
                        "sum by (position) (rate(tandem_spec_decode_num_accepted_tokens_per_pos_total[5m]))",
                    ),
                ),
            ),
        ),
    ),
)
