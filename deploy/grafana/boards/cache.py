"""What the nodes' pools hold, and what prompts find in them."""

from __future__ import annotations

from panels import Panel, Row

ROWS = (
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
        "Images",
        (
            Panel(
                "Images needed",
                "Computed by the vision tower, or kept from an earlier prompt. A cached prefix needs none.",
                "short",
                (("{{source}}", "sum by (source) (rate(tandem_images_encoded_total[5m]))"),),
            ),
            Panel(
                "Vision tower",
                "Share of a second that it runs, and what is kept of its work.",
                "short",
                (
                    ("{{instance}} busy", "sum by (instance) (rate(tandem_image_encode_seconds_total[5m]))"),
                    ("{{instance}} kept, bytes", "sum by (instance) (tandem_mm_encoder_cache_bytes)"),
                ),
            ),
            Panel(
                "Images refused",
                "Requests that got a 400 because of an image, by reason.",
                "short",
                (("{{role}} {{reason}}", "sum by (role, reason) (rate(tandem_images_refused_total[5m]))"),),
                failure=True,
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
    Row(
        "Tiers",
        (
            Panel(
                "Tokens read back",
                "Prompt tokens that memory lacked and a tier had: what tiers add to the tokens found above.",
                "short",
                (("{{instance}} {{tier}}", "sum by (instance, tier) (rate(tandem_tier_hit_tokens_total[5m]))"),),
            ),
            Panel(
                "Bytes",
                "Read back and written. What is written wears a disk: hold it against the drive's rating.",
                "Bps",
                (("{{op}} {{tier}}", "sum by (op, tier) (rate(tandem_tier_bytes_total[5m]))"),),
            ),
            Panel(
                "Used",
                "Share of each tier's size.",
                "percentunit",
                (("{{instance}} {{tier}}", "tandem_tier_used_bytes / tandem_tier_size_bytes"),),
            ),
            Panel(
                "Objects",
                "Prefixes and extents that can be found: they grow when a node has scanned its folder.",
                "short",
                (("{{instance}} {{tier}}", "tandem_tier_objects"),),
            ),
            Panel(
                "Time of a read",
                "Of reading and checking one prefix.",
                "s",
                (
                    (
                        "p50 {{tier}}",
                        "histogram_quantile(0.5, sum by (le, tier) (rate(tandem_tier_read_seconds_bucket[5m])))",
                    ),
                    (
                        "p99 {{tier}}",
                        "histogram_quantile(0.99, sum by (le, tier) (rate(tandem_tier_read_seconds_bucket[5m])))",
                    ),
                ),
            ),
            Panel(
                "Not written, and errors",
                "What was evicted and is not there, by reason; objects that were bad; writes that failed.",
                "short",
                (
                    ("not written, {{reason}}", "sum by (reason) (rate(tandem_tier_skipped_total[5m]))"),
                    ("read, {{reason}}", "sum by (reason) (rate(tandem_tier_read_errors_total[5m]))"),
                    ("write, {{reason}}", "sum by (reason) (rate(tandem_tier_write_errors_total[5m]))"),
                ),
            ),
        ),
    ),
)
