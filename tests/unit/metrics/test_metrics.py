from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.metrics.metrics import Metrics
from common.metrics.outcomes import Outcome
from common.metrics.table import METRICS, PREFIX, Kind, Role

# The names of the interface, as dashboards use them.
INTERFACE = """
requests_total{route,outcome} requests_running requests_waiting request_ttft_seconds request_itl_seconds
request_e2e_seconds request_phase_seconds{phase} prompt_tokens_total{source} generation_tokens_total
prefix_cache_query_tokens_total prefix_cache_hit_tokens_total{group} prefix_cache_lost_tokens_total{reason}
kv_blocks{state} state_slots{state} checkpoints_total{event,reason} evictions_total{group} preemptions_total
transfer_bytes_total{direction,kind} transfer_seconds transfer_descriptors transfer_failures_total{reason} leases{state}
leases_expired_total late_reads_rejected_total proxy_decisions_total{policy,placement} node_up{node}
"""

BEYOND_INTERFACE = """
step_time_error_ratio{kind} step_seconds_total{kind} async_scheduling_steps_total{order}
proxy_elastic_placements_total{work}
proxy_targets_total{target,kept} proxy_recommended_nodes{node_role}
requests_waiting_for_peer transfers_in_flight transfer_early_parts_total agent_recreations_total
source_queries_total{result} proxy_retries_total{reason}
proxy_retries_refused_total proxy_migrations_total{outcome} breaker_state{node}
breaker_opened_total{node}
proxy_predicted_ttft_seconds{placement} proxy_ttft_ratio{placement}
prefix_index_entries{node} prefix_index_snapshots_total prompts_tokenised_total requests_dropped_total{reason}
event_loop_lag_seconds{cause} unknown_fields_total{route}
spec_decode_num_drafts_total spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total
spec_decode_num_accepted_tokens_per_pos_total{position}
tier_objects{tier} tier_used_bytes{tier} tier_size_bytes{tier} tier_bytes_total{tier,op} tier_hit_tokens_total{tier}
tier_skipped_total{tier,reason} tier_read_errors_total{tier,reason} tier_write_errors_total{tier,reason}
tier_read_seconds{tier}
images_encoded_total{source} image_encode_seconds_total mm_encoder_cache_bytes images_refused_total{reason}
grammar_checks_total{result} grammar_check_seconds grammars_waiting grammar_compile_seconds grammar_mask_seconds
"""


def samples(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = metrics.render()[0].decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return samples(metrics)[PREFIX + name, frozenset({"role": metrics.role.value, **labels}.items())]


def test_table_has_the_names_and_labels_of_the_interface_and_of_ours() -> None:
    expected = {
        name: tuple(labels.split(",")) if labels else ()
        for name, labels in re.findall(r"([a-z0-9_]+)(?:\{([a-z_,]+)\})?", INTERFACE + BEYOND_INTERFACE)
    }
    table = {spec.name: spec.labels for spec in METRICS}
    assert table.pop("build_info") == ("version", "torch", "transformers", "nixl")
    assert table == expected
    assert all(spec.name.endswith("_total") == (spec.kind is Kind.COUNTER) for spec in METRICS)


@pytest.mark.parametrize("role", list(Role))
def test_exposition_holds_the_roles_names_and_no_others(role: Role) -> None:
    metrics = Metrics(role, versions={"version": "1.2"})
    text, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    exposed = set(re.findall(r"^# TYPE (\S+)", text.decode(), re.MULTILINE))
    assert exposed == {PREFIX + spec.name for spec in METRICS if role in spec.roles}
    assert "_created" not in text.decode()
    assert all(dict(labels)["role"] == role.value for _, labels in samples(metrics))
    assert value(metrics, "build_info", version="1.2", torch="", transformers="", nixl="") == 1


def test_two_apps_in_one_process_do_not_share_counts() -> None:
    one, two = Metrics(Role.DECODE), Metrics(Role.DECODE)
    one.inc("generation_tokens_total", 5)
    assert value(one, "generation_tokens_total") == 5
    assert value(two, "generation_tokens_total") == 0


def test_source_is_read_at_each_scrape() -> None:
    pools = {("free",): 10, ("used",): 0}
    metrics = Metrics(Role.PREFILL)
    metrics.set_source(lambda: {"kv_blocks": pools, "preemptions_total": {(): 4}})
    assert value(metrics, "kv_blocks", state="free") == 10
    pools["free",], pools["used",] = 7, 3
    assert value(metrics, "kv_blocks", state="free") == 7
    assert value(metrics, "kv_blocks", state="used") == 3
    assert value(metrics, "preemptions_total") == 4


@pytest.mark.parametrize(
    "bad", [{"nope": {(): 1}}, {"requests_total": {("a", "b"): 1}}, {"kv_blocks": {(): 1}}, {"node_up": {("n",): 1}}]
)
def test_source_with_a_wrong_name_or_labels_is_a_bug(bad: dict[str, dict[tuple[str, ...], float]]) -> None:
    metrics = Metrics(Role.DECODE)
    metrics.set_source(lambda: bad)
    with pytest.raises(AssertionError):
        metrics.render()


def test_request_helpers_fill_histograms_and_counters() -> None:
    metrics = Metrics(Role.PROXY)
    metrics.request_finished("chat", Outcome.STOP, 2.0)
    metrics.observe_ttft(0.004)
    metrics.observe_itl(0.006)
    metrics.observe_phase("prefill", 0.5)
    metrics.observe_phase("transfer", None)
    metrics.inc("proxy_decisions_total", policy="round_robin", placement="remote")
    assert value(metrics, "requests_total", route="chat", outcome="stop") == 1
    assert value(metrics, "request_e2e_seconds_sum") == 2.0
    assert value(metrics, "request_ttft_seconds_bucket", le="0.0025") == 0
    assert value(metrics, "request_ttft_seconds_bucket", le="0.005") == 1
    assert value(metrics, "request_itl_seconds_count") == 1
    assert value(metrics, "request_phase_seconds_count", phase="prefill") == 1
    assert not any(("phase", "transfer") in labels for _, labels in samples(metrics))
    assert value(metrics, "proxy_decisions_total", policy="round_robin", placement="remote") == 1


def test_transfer_helpers_split_bytes_and_count_late_reads() -> None:
    metrics = Metrics(Role.DECODE)
    metrics.count_prompt_tokens(computed=1, cached=2, transferred=3)
    metrics.transfer_finished(seconds=0.1, num_descriptors=3, kv_bytes=100, state_bytes=20)
    metrics.transfer_failed("stale")
    metrics.transfer_failed("failed")
    assert value(metrics, "prompt_tokens_total", source="transferred") == 3
    assert value(metrics, "transfer_bytes_total", direction="in", kind="kv") == 100
    assert value(metrics, "transfer_bytes_total", direction="in", kind="state") == 20
    assert value(metrics, "transfer_failures_total", reason="stale") == 1
    assert value(metrics, "late_reads_rejected_total") == 1


def test_counter_of_another_role_is_a_bug() -> None:
    with pytest.raises(KeyError):
        Metrics(Role.PROXY).inc("generation_tokens_total")


def test_buckets_reach_from_a_millisecond_to_a_minute() -> None:
    for spec in METRICS:
        if spec.kind is Kind.HISTOGRAM:
            assert list(spec.buckets) == sorted(set(spec.buckets))
            if spec.name.endswith("_seconds") and "itl" not in spec.name:
                assert spec.buckets[0] <= 0.005
                assert spec.buckets[-1] >= 60


def test_histogram_of_one_thread_when_observed_then_exposed_like_any_other() -> None:
    plain, usual = Metrics(Role.PROXY, one_thread=("request_itl_seconds",)), Metrics(Role.PROXY)
    observe = plain.observer("request_itl_seconds")
    for seconds in (0.001, 0.0011, 0.2, 99.0):
        observe(seconds)
        usual.observe_itl(seconds)
    plain.observe_itl(0.003)
    usual.observe_itl(0.003)
    assert samples(plain) == samples(usual)
    assert sorted(plain.render()[0].splitlines()) == sorted(usual.render()[0].splitlines())
