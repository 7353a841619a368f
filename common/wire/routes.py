"""Paths of our HTTP routes. Clients and operators use the public ones. Our own processes call each other's internal
ones, which need the cluster key when one is set."""

from __future__ import annotations

COMPLETIONS_ROUTE = "/v1/completions"
CHAT_ROUTE = "/v1/chat/completions"
RESPONSES_ROUTE = "/v1/responses"
MESSAGES_ROUTE = "/v1/messages"
COUNT_TOKENS_ROUTE = "/v1/messages/count_tokens"
MODELS_ROUTE = "/v1/models"
OPENAPI_ROUTE = "/openapi.json"
DOCS_ROUTE = "/docs"
TOKENIZE_ROUTE = "/tokenize"
DETOKENIZE_ROUTE = "/detokenize"

HEALTH_ROUTE = "/health"
READY_ROUTE = "/ready"
METRICS_ROUTE = "/metrics"
VERSION_ROUTE = "/version"

INTERNAL_PREFIX = "/internal/"
# Served by nodes and by the proxy, for operators.
DRAIN_ROUTE = "/internal/v1/drain"
# Served by the proxy, for operators.
NODES_ROUTE = "/internal/v1/nodes"
# Served by nodes, called by the proxy.
INFO_ROUTE = "/internal/v1/info"
LOAD_ROUTE = "/internal/v1/load"
TOKENIZER_ROUTE = "/internal/v1/tokenizer"
CACHE_EVENTS_ROUTE = "/internal/v1/cache/events"
HAND_OVER_ROUTE = "/internal/v1/streams/hand-over"
# Served by nodes, called by other nodes; the proxy releases leases too.
TRANSFER_ROUTE = "/internal/v1/transfer"
LIVENESS_ROUTE = "/internal/v1/liveness"
PULL_ROUTE = "/internal/v1/pull"
MANIFEST_CHECK_ROUTE = "/internal/v1/manifests/check"
LEASE_RENEW_ROUTE = "/internal/v1/leases/renew"
LEASE_RELEASE_ROUTE = "/internal/v1/leases/release"
# Served by nodes, for operators and tests; the last two only when test hooks are on.
CACHE_CHECK_ROUTE = "/internal/v1/cache/check"
TEST_DAMAGE_ROUTE = "/internal/v1/test/damage"
TEST_TRANSFER_FAULT_ROUTE = "/internal/v1/test/transfer-fault"
