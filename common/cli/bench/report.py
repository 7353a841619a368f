"""Turns samples into figures, as an object and as text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from common.cli.bench.client import Sample

PERCENTILES = (50, 90, 99)
TRACE_COUNTS = ("transferred_bytes", "transferred_blocks", "transferred_states", "draft_tokens", "accepted_tokens")
BUSY_CLIENT_S = 0.02
"""Seconds by which this program's own event loop may be late (p99) before the report warns of it."""


def summarize(samples: Sequence[Sample], duration_s: float) -> dict[str, Any]:
    """Counts, rates and distributions of a run that took ``duration_s`` seconds. Latencies are those of answered
    requests; of what a server does not report the figure is None."""
    good = [sample for sample in samples if sample.error is None]
    num_output = sum(sample.num_output_tokens for sample in good)
    num_prompt = _sum_known(sample.num_prompt_tokens for sample in good)
    num_cached = _sum_known(sample.num_cached_tokens for sample in good)
    rates_over_s = max(duration_s, 1e-9)
    report: dict[str, Any] = {
        "requests": len(samples),
        "failed": len(samples) - len(good),
        "errors": dict(Counter(sample.error for sample in samples if sample.error is not None).most_common()),
        "seconds": duration_s,
        "requests_per_second": len(good) / rates_over_s,
        "output_tokens_per_second": num_output / rates_over_s,
        "prompt_tokens_per_second": num_prompt / rates_over_s if num_prompt is not None else None,
        "prompt_tokens": num_prompt,
        "cached_tokens": num_cached,
        "cached_share": num_cached / num_prompt if num_prompt and num_cached is not None else None,
        "output_tokens": num_output,
        "ttft_seconds": distribution(sample.ttft_s for sample in good if sample.ttft_s is not None),
        "itl_seconds": distribution(gap for sample in good for gap in sample.gaps_s),
        "tpot_seconds": distribution(
            sum(sample.gaps_s) / (sample.num_output_tokens - 1)
            for sample in good
            if sample.gaps_s and sample.num_output_tokens > 1
        ),
        "e2e_seconds": distribution(sample.e2e_s for sample in good),
    }
    num_turns = max((sample.turn for sample in good), default=0) + 1
    if num_turns > 1:
        report["turns"] = [_of_turn(good, turn) for turn in range(num_turns)]
    traces = [sample.trace for sample in good if sample.trace is not None]
    if traces:
        report["placement"] = summarize_traces(traces)
    return report


def summarize_traces(traces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Where requests ran, what was moved for them, and how long each phase took."""
    phases: dict[str, list[float]] = {}
    for trace in traces:
        for phase, value in (trace.get("seconds") or {}).items():
            if isinstance(value, int | float):
                phases.setdefault(phase, []).append(value)
    return {
        "requests": len(traces),
        "placements": dict(Counter(str(trace.get("placement")) for trace in traces).most_common()),
        "decode_nodes": dict(Counter(str(trace.get("decode_node")) for trace in traces).most_common()),
        "prefill_nodes": dict(
            Counter(str(node) for trace in traces if (node := trace.get("prefill_node"))).most_common()
        ),
        **{name: sum(trace.get(name) or 0 for trace in traces) for name in TRACE_COUNTS},
        "prefill_cached_tokens": sum(trace.get("prefill_cached_tokens") or 0 for trace in traces),
        "decode_cached_tokens": sum(trace.get("decode_cached_tokens") or 0 for trace in traces),
        "phase_seconds": {phase: distribution(values) for phase, values in phases.items()},
    }


def distribution(values: Iterable[float]) -> dict[str, float]:
    """Mean, percentiles (nearest rank) and maximum; empty for no values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    ranks = {f"p{level}": ordered[math.ceil(level / 100 * len(ordered)) - 1] for level in PERCENTILES}
    return {"mean": sum(ordered) / len(ordered), **ranks, "max": ordered[-1]}


def row(sample: Sample) -> dict[str, Any]:
    """One request in the report."""
    return {
        "turn": sample.turn,
        "start_seconds": sample.start_s,
        "ttft_seconds": sample.ttft_s,
        "e2e_seconds": sample.e2e_s,
        "gap_seconds": sample.gaps_s,
        "prompt_tokens": sample.num_prompt_tokens,
        "cached_tokens": sample.num_cached_tokens,
        "output_tokens": sample.num_output_tokens,
        "tandem": sample.trace,
        "error": sample.error,
    }


def as_text(report: Mapping[str, Any]) -> str:
    """The report for people; milliseconds."""
    figures, settings = report["figures"], report["settings"]
    load = (
        f"rate {settings['request_rate']:g}/s" if settings["request_rate"] else f"{settings['concurrency']} at a time"
    )
    lines = [
        f"tandem bench {report['version'] or ''} {settings['url']}: {load}, {settings['prompt_tokens']} prompt tokens"
        f" ({settings['shared_tokens']} shared), {settings['max_tokens']} to generate, {settings['turns']} turns,"
        f" {settings['dataset']}, seed {settings['seed']}"
    ]
    if report["interrupted"]:
        lines.append(f"interrupted: {report['unfinished']} requests in flight were given up; this is what ended before")
    lines.append(f"requests   {figures['requests']} ({figures['failed']} failed) in {figures['seconds']:.2f} s")
    lines += [f"  failed: {count} x {error}" for error, count in figures["errors"].items()]
    lines.append(
        f"throughput {figures['requests_per_second']:.2f} requests/s, {figures['output_tokens_per_second']:.1f} output"
        f" tokens/s"
    )
    if figures["cached_share"] is not None:
        lines.append(
            f"cache      {figures['cached_tokens']} of {figures['prompt_tokens']} prompt tokens"
            f" ({figures['cached_share']:.1%}) were cached"
        )
    lines += [_line(label, figures[name]) for name, label in _LATENCIES]
    for turn, each in enumerate(figures.get("turns", ())):
        share = "" if each["cached_share"] is None else f", {each['cached_share']:.1%} cached"
        lines.append(f"  turn {turn + 1}: {each['requests']} requests{share}, {_line('TTFT', each['ttft_seconds'])}")
    if placement := figures.get("placement"):
        lines += _placement_lines(placement)
    lag = report["client_lag_seconds"].get("p99", 0.0)
    if lag > BUSY_CLIENT_S and figures["e2e_seconds"]:
        lines.append(f"warning: this client was late itself (p99 {lag * 1000:.0f} ms): latencies are too long")
    return "\n".join(lines) + "\n"


_LATENCIES = (("ttft_seconds", "TTFT"), ("itl_seconds", "ITL"), ("tpot_seconds", "TPOT"), ("e2e_seconds", "e2e"))


def _placement_lines(placement: Mapping[str, Any]) -> list[str]:
    counts = ", ".join(f"{count} {name}" for name, count in placement["placements"].items())
    moved = placement["transferred_bytes"] / 2**20
    drafts = [f"drafts     {placement['accepted_tokens']} of {placement['draft_tokens']} drafted tokens were right"]
    return [
        f"placement  {counts}; moved {moved:.1f} MiB, {placement['transferred_blocks']} blocks,"
        f" {placement['transferred_states']} states",
        *(drafts if placement["draft_tokens"] else ()),
        *(_line(f"  {phase}", values) for phase, values in placement["phase_seconds"].items()),
    ]


def _line(label: str, values: Mapping[str, float]) -> str:
    figures = "  ".join(f"{key} {value * 1000:.1f}" for key, value in values.items())
    return f"{label:<10} {figures or 'no samples'}{' ms' if figures else ''}"


def _of_turn(samples: Sequence[Sample], turn: int) -> dict[str, Any]:
    chosen = [sample for sample in samples if sample.turn == turn]
    num_prompt = _sum_known(sample.num_prompt_tokens for sample in chosen)
    num_cached = _sum_known(sample.num_cached_tokens for sample in chosen)
    return {
        "requests": len(chosen),
        "prompt_tokens": num_prompt,
        "cached_tokens": num_cached,
        "cached_share": num_cached / num_prompt if num_prompt and num_cached is not None else None,
        "ttft_seconds": distribution(sample.ttft_s for sample in chosen if sample.ttft_s is not None),
    }


def _sum_known(values: Iterable[int | None]) -> int | None:
    """None when nothing is known of any."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
