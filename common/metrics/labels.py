"""What the values of metrics' labels mean, for the documentation; a test compares them with what a running service
exposes. Names of metrics are without prefix."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from common.metrics.outcomes import Outcome


@dataclass(frozen=True, slots=True)
class LabelValues:
    """``values``: value -> meaning; one with ``<N>`` stands for all with a number there."""

    metrics: tuple[str, ...]
    label: str
    values: Mapping[str, str]


POOL_STATES = {
    "free": "holds nothing",
    "cached": "holds content that a request may find, and is free for whoever needs it",
    "used": "of a running request",
    "leased": "of a finished prompt that waits for its reader, or is written to a tier",
    "quarantined": "a read that was given up may still write it",
}
PLACEMENTS = {
    "remote": "a prefill node computes the prompt, the decode node pulls it",
    "local": "the node that generates computes the prompt itself",
}

LABEL_VALUES: tuple[LabelValues, ...] = (
    LabelValues(
        ("requests_total",),
        "outcome",
        {
            Outcome.STOP: "answered to its end; the model or a stop string ended it",
            Outcome.LENGTH: "answered to its end; `max_tokens` ended one of its choices",
            Outcome.ABORT: "the client left",
            Outcome.STALL: "the client stood still and was disconnected",
            Outcome.REJECTED: "refused by the client's own fault: malformed, too long, beyond its key's limits",
            Outcome.DEADLINE: "the deadline that the client gave passed, or would have",
            Outcome.CAPACITY: "turned away for want of room: a full queue, too long a wait, a drain",
            Outcome.ERROR: "failed, and not by the client's fault: alerts ask for this one alone",
        },
    ),
    LabelValues(
        ("request_phase_seconds",),
        "phase",
        {
            "queue": "waiting in this process",
            "prefill": "computing the prompt; at the proxy: the prefill leg",
            "transfer": "from the prompt's last token computed to its last bytes here and checked; reading from a tier",
            "first_token": "sampling the first token",
        },
    ),
    LabelValues(
        ("event_loop_lag_seconds",),
        "cause",
        {
            "any": "as it was, whatever the reason: a busy machine too",
            "own": "of that, what its own work can have caused: no wait for a processor, no more than it computed",
        },
    ),
    LabelValues(
        ("step_time_error_ratio", "step_seconds_total"),
        "kind",
        {"prompt": "steps with prompt tokens", "decode": "steps that only generate"},
    ),
    LabelValues(
        ("async_scheduling_steps_total",),
        "order",
        {
            "ahead": "before the tokens of the step before were known",
            "sampling": "after them: that step had prompts, or a request whose tokens the host has to choose",
            "others": "after them: other requests ran, or waited and had room",
            "ended": "after them: all answers of that step ended with it, as far as lengths said",
            "memory": "after them: no block or slot was left for a step ahead, or a block was to be copied first",
            "error": "after them: the launch ahead raised",
        },
    ),
    LabelValues(
        ("prompt_tokens_total",),
        "source",
        {"computed": "here", "cached": "found here, in memory or in a tier", "transferred": "pulled from another node"},
    ),
    LabelValues(
        ("prefix_cache_hit_tokens_total", "evictions_total"),
        "group",
        {
            "joint": "what requests could use: the shortest of the groups",
            "attention": "blocks of full attention",
            "mla": "blocks of latent attention",
            "window_<N>": "blocks of sliding windows of N tokens",
            "state": "recurrent states",
        },
    ),
    LabelValues(
        ("prefix_cache_lost_tokens_total",),
        "reason",
        {
            "no_state": "attention was there, no state to go on from",
            "no_attention": "a state was there, attention before it was not",
            "no_window": "the last tokens of a sliding window were not there",
        },
    ),
    LabelValues(("kv_blocks", "state_slots"), "state", POOL_STATES),
    LabelValues(
        ("checkpoints_total",),
        "event",
        {"saved": "kept", "skipped": "could not be kept", "evicted": "dropped again"},
    ),
    LabelValues(
        ("checkpoints_total",),
        "reason",
        {
            "prompt_end": "saved at the end of a prompt",
            "semantic": "saved at a message's end",
            "grid": "saved at an interval (`--prefix-cache-retention-interval`) or a block's end",
            "junction": "saved where another prompt had parted",
            "donated": "saved at the end of an answer: the running state itself",
            "pulled": "saved with what was pulled",
            "exists": "skipped: is there already",
            "no_attention": "skipped: the attention before it is not cached",
            "no_slot": "skipped: no slot",
            "no_block": "skipped: no block",
            "limit": "skipped or evicted: too many checkpoints, in all or between two blocks",
            "capacity": "evicted: its slot was needed",
            "tail": "evicted: its tail's blocks were needed",
            "attention": "evicted: with the attention before it",
        },
    ),
    LabelValues(("transfer_bytes_total",), "direction", {"in": "this node read"}),
    LabelValues(("transfer_bytes_total",), "kind", {"kv": "attention blocks", "state": "recurrent states"}),
    LabelValues(
        ("transfer_failures_total",),
        "reason",
        {
            "stale": "read too late: the memory had changed",
            "wrong_content": "another prompt than promised",
            "digest_mismatch": "other bytes than promised",
            "timed_out": "no progress for `--kv-transfer-timeout-seconds`",
            "peer_lost": "the other node is dead, or silent for 1.5 s",
            "leg_failed": "the prefill node will not compute the prompt",
            "unknown_pull": "the prefill node does not know the prompt",
            "unproven": "a manifest that its holder did not make, or that was changed on its way",
            "layout_mismatch": "the other node's pools are laid out otherwise: its log line names the field",
            "mismatch": "another model, or another kind of memory",
            "failed": "everything else",
        },
    ),
    LabelValues(
        ("spec_decode_num_accepted_tokens_per_pos_total",),
        "position",
        {"<N>": "behind N tokens of the draft; 0 to `num_speculative_tokens` - 1"},
    ),
    LabelValues(
        (
            "tier_objects",
            "tier_used_bytes",
            "tier_size_bytes",
            "tier_bytes_total",
            "tier_hit_tokens_total",
            "tier_skipped_total",
            "tier_read_errors_total",
            "tier_write_errors_total",
            "tier_read_seconds",
        ),
        "tier",
        {
            "host": "`--kv-tier host:`",
            "disk": "`--kv-tier disk:`",
            "shared": "`--kv-tier shared:`",
            "mooncake": "`--kv-tier mooncake:`",
        },
    ),
    LabelValues(("tier_bytes_total",), "op", {"read": "read back", "write": "written"}),
    LabelValues(
        ("tier_skipped_total",),
        "reason",
        {
            "late": "evicted before it was looked at, or while the tier's disk refused writes or hung",
            "value": "less likely to return than `--kv-tier-min-return`",
            "rate": "no budget (`--kv-tier-write-rate`)",
            "full": "worth less than what would have had to go",
        },
    ),
    LabelValues(
        ("tier_read_errors_total",),
        "reason",
        {
            "missing": "deleted by somebody else",
            "unreadable": "it is no plain file",
            "failing": "the disk cannot read this object; it is written again when it is computed again",
            "io": "too many open files, a server that is away; the object stays, the tier is not read for 30 s",
            "short": "another length than its header says",
            "header": "damaged, or made without the key",
            "digest": "other bytes than were written",
            "other": "a whole object of something else",
            "deadline": "no answer in time; the tier is not read for 30 s",
            "stuck": "not tried: all threads wait for reads beyond their deadline",
        },
    ),
    LabelValues(
        ("tier_write_errors_total",),
        "reason",
        {
            "full": "no room on the disk; nothing is written for 10 s",
            "io": "the disk failed; nothing is written for 10 s",
            "stale": "the write took so long that the memory was given to others",
        },
    ),
    LabelValues(
        ("grammar_checks_total",),
        "result",
        {"good": "it can be used", "refused": "the request got a 400 that says why"},
    ),
    LabelValues(
        ("source_queries_total",),
        "result",
        {
            "hit": "the other node has more of the prefix",
            "miss": "it has not",
            "refused": "it will not say",
            "timeout": "no answer in time",
            "failed": "the question failed",
            "mismatch": "another model or layout",
        },
    ),
    LabelValues(
        ("images_encoded_total",),
        "source",
        {"computed": "by the vision tower", "cache": "kept from an earlier prompt (`--mm-encoder-cache-memory`)"},
    ),
    LabelValues(
        ("images_refused_total",),
        "reason",
        {
            "limit": "too many, too large, or too long for its width",
            "format": "none of PNG, JPEG, GIF and WebP",
            "content": "cut short, damaged, or not of the size that its header says",
            "url": "no data URL, and none that is fetched",
            "fetch": "its host is not allowed, is not public, or did not give it in time",
            "model": "the model takes none, or lacks what is needed for them here",
        },
    ),
    LabelValues(("leases",), "state", {"active": "held for a reader, or while it is written to a tier"}),
    LabelValues(("proxy_decisions_total", "proxy_predicted_ttft_seconds", "proxy_ttft_ratio"), "placement", PLACEMENTS),
    LabelValues(
        ("proxy_elastic_placements_total",),
        "work",
        {"prompt": "a decode node computes a prompt that is new to it", "answer": "a prefill node generates"},
    ),
    LabelValues(
        ("proxy_targets_total",),
        "target",
        {"ttft": "the first token's time", "itl": "the mean time between two tokens of a choice"},
    ),
    LabelValues(("proxy_targets_total",), "kept", {"yes": "in time", "no": "late, or turned away for it"}),
    LabelValues(
        ("proxy_recommended_nodes",), "node_role", {"prefill": "that compute prompts", "decode": "that generate"}
    ),
    LabelValues(
        ("proxy_retries_total",),
        "reason",
        {
            "refused": "the node does not take connections",
            "broken": "the connection broke, or the node gave no sign of life",
            "garbage": "what it answers is no answer",
            "status": "a 5xx",
            "busy": "it is full or drains",
            "transfer": "it could not get the prompt",
        },
    ),
    LabelValues(
        ("proxy_migrations_total",),
        "outcome",
        {
            "resumed": "its node broke, or did not take it over, and it went on at another one",
            "gave_up": "its node broke, and it ended with an error event",
            "handed_over": "a prefill node had begun it, and a decode node goes on",
        },
    ),
    LabelValues(
        ("requests_dropped_total",),
        "reason",
        {
            "rejected-queue-full": "the queue is full",
            "rejected-deadline": "its turn would come after its deadline",
            "rejected-concurrency": "its key's `max_concurrency`",
            "rejected-rate-limit": "its key's rate",
            "rejected-late": "its first token would come after its target, behind those before it",
            "evicted-priority": "a better one took its place in the queue",
            "evicted-deadline": "its deadline passed",
            "evicted-timeout": "waited for `--max-queue-seconds`",
        },
    ),
)


def label_values(metric: str, label: str) -> Collection[str]:
    """Those of a metric that has this label."""
    return next(each.values for each in LABEL_VALUES if metric in each.metrics and each.label == label)
