"""Every import of every module, indented ones too, against the table of allowed directions."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = ("common", "prefill_node", "decode_node", "proxy")
HEAVY = ("torch", "nixl", "transformers", "numpy", "safetensors", "accelerate", "PIL")

# Part -> what it may import of ours besides itself. `common.errors` is open to all.
ALLOWED = {
    "proxy.simulation": {
        "proxy.nodes",
        "proxy.placement",
        "proxy.prefix_index",
        "common.config",
        "common.engine",
        "common.kv_cache",
        "common.request",
        "common.simulate",
        "common.wire",
    },
    "proxy": {
        "common.openai",
        "common.text",
        "common.wire",
        "common.server",
        "common.metrics",
        "common.telemetry",
        "common.config",
        "common.engine.pacing.regression",
        "common.engine.pacing.shares",
        "common.grammar",
        "common.kv_cache.keys",
        "common.images",
    },
    "prefill_node": {"common"},
    "decode_node": {"common"},
    "common.node": {
        "common.engine",
        "common.models",
        "common.transfer",
        "common.kv_cache",
        "common.openai",
        "common.text",
        "common.wire",
        "common.server",
        "common.metrics",
        "common.telemetry",
        "common.request",
        "common.config",
        "common.names",
        "common.grammar",
        "common.images",
        "common.tiers",
    },
    "common.engine": {"common.models", "common.kv_cache", "common.request", "common.grammar", "common.images"},
    "common.models": {
        "common.ops",
        "common.geometry",
        "common.kv_cache.spec",
        "common.kv_cache.shards",
        "common.images",
    },
    "common.ops": set(),
    "common.simulate": {"common.geometry", "common.kv_cache", "common.config"},
    "common.geometry": {"common.kv_cache.spec"},
    "common.kv_cache": {"common.fence", "common.request", "common.images"},
    "common.transfer": {"common.fence"},
    "common.tiers": {"common.kv_cache"},
    "common.fence": set(),
    "common.grammar": set(),
    "common.text": {"common.openai", "common.wire", "common.images"},
    "common.openai": {"common.wire", "common.request", "common.images"},
    "common.wire": {"common.images", "common.names"},
    "common.images": set(),
    "common.server": {"common.openai.errors", "common.openai.openapi", "common.wire", "common.telemetry"},
    "common.demo_model": set(),
    "common.cli": {
        "common.config",
        "common.demo_model",
        "common.simulate",
        "proxy.simulation",
        "common.metrics.labels",
        "common.metrics.table",
        "common.openai",
        "common.telemetry",
        "common.wire",
    },
    "common.metrics": set(),
    "common.telemetry": set(),
    "common.errors": set(),
    "common.config": {"common.names"},
    "common.names": set(),
    "common.request": {"common.images"},
}
# Inside a part: its folders and the modules beside them, each of which may import only what stands before it.
ORDER: dict[str, tuple[str, ...]] = {
    "common.cli": ("bench", "log_sink", "supervisor", "flags", "gpus", "up", "probe", "docs", "main", "__main__"),
    "common.engine": (
        "rates",
        "pacing",
        "drafting",
        "sampling",
        "plan",
        "sequence",
        "speculation",
        "scheduling",
        "scheduler",
        "model_runner",
        "outputs",
        "live_sequences",
        "tokens",
        "remote_prefixes",
        "containment",
        "finished_prompts",
        "core",
    ),
    "common.engine.drafting": ("drafter", "prompt_lookup", "suffix", "config", "allowance", "pay"),
    "common.engine.pacing": ("regression", "shares", "step_model"),
    "common.engine.sampling": ("token_counts", "token_lists", "draw", "grammar", "grammar_compiler", "sampler"),
    "common.engine.scheduling": (
        "schedule",
        "shared_prefixes",
        "prompt_share",
        "image_chunks",
        "segments",
        "head_drafts",
        "suspects",
    ),
    "common.engine.tokens": ("grammars", "step_tokens", "ahead"),
    "common.geometry": ("parts", "dense", "linear", "mamba", "families", "refused", "geometry"),
    "common.grammar": ("limits", "trial", "checker"),
    "common.images": ("span", "header", "layout", "rules", "read_rules", "source"),
    "common.kv_cache": (
        "keys",
        "spec",
        "layout",
        "shards",
        "layout_document",
        "checkpoints",
        "observe",
        "eviction",
        "pools",
        "groups",
        "prefix",
        "coordinator",
        "tiers",
        "sequences",
        "sharing",
        "invariants",
        "planner",
        "manager",
    ),
    "common.kv_cache.checkpoints": ("checkpoint", "save_policy"),
    "common.kv_cache.eviction": ("base", "reuse", "block_tree", "value_orders", "value_policy", "create"),
    "common.kv_cache.groups": ("single_type", "full_attention", "sliding_window", "recurrent_state"),
    "common.kv_cache.observe": ("events", "stats"),
    "common.kv_cache.pools": ("generations", "unit_pool", "copy_queue", "storage"),
    "common.kv_cache.prefix": ("hits", "admitted_prefixes", "lookup"),
    "common.kv_cache.sequences": ("allocation", "sequence_table", "checkpoint_saver", "prompt_ends", "rollback"),
    "common.kv_cache.sharing": ("leases", "lease_manager", "remote_prefix"),
    "common.kv_cache.tiers": ("break_even", "write_budget", "stored_prefix", "leaving", "index", "tier", "stack"),
    "common.models": ("adapter", "cpu", "fused", "parallel", "backends", "vision", "loading", "synthetic", "prebuild"),
    "common.models.parallel": ("group", "slicing", "norms", "attention", "mixers", "mlps", "shard_model"),
    "common.models.backends": ("upload", "backend", "graphs", "cpu", "cuda", "create"),
    "common.node": (
        "cache_warnings",
        "generation_config",
        "regions",
        "digests",
        "metrics",
        "device",
        "device_memory",
        "ranks",
        "runtime",
        "engine_thread",
        "peers",
        "lend",
        "pull",
        "tiers",
        "serving",
        "node",
        "routes",
        "app",
        "main",
    ),
    "common.node.ranks": ("ranks", "runner", "follower"),
    "common.node.peers": ("liveness", "names", "directory"),
    "common.node.lend": ("manifest_builder", "rendezvous", "prefill_leg", "prefix_holder"),
    "common.node.pull": (
        "remote_leases",
        "manifest_stream",
        "prefix_reader",
        "rank_puller",
        "rank_agents",
        "pull_task",
        "metrics",
        "peer_reader",
        "engine_bridge",
        "quarantine",
        "sources",
        "handoff",
    ),
    "common.node.tiers": (
        "node_tier",
        "prefix_objects",
        "writer",
        "scanner",
        "tier_reader",
        "node_tiers",
        "create",
    ),
    "common.node.serving": (
        "admission",
        "request_record",
        "tracing",
        "answers",
        "choices",
        "images",
        "prompt_jobs",
        "response_builder",
        "serving",
    ),
    "common.openai": (
        "errors",
        "logprobs",
        "prompt_ids",
        "messages",
        "json_schema",
        "constraint",
        "bodies",
        "sampling",
        "protocol",
        "responses",
        "foreign",
        "answers",
        "openapi",
    ),
    "common.openai.bodies": ("base", "values", "models", "unsupported"),
    "common.ops": ("step", "interface", "row_ops", "torch", "cpu", "triton", "select"),
    "common.ops.triton": (
        "rowwise",
        "conv",
        "kv",
        "mamba2",
        "mamba1",
        "delta_chunks",
        "delta_spans",
        "delta",
        "attention_kernels",
        "attention",
        "backend",
    ),
    "common.simulate": ("trace", "ideal_cache", "tiers", "simulate"),
    "common.text": (
        "answers",
        "chat_template",
        "system_messages",
        "boundaries",
        "detokenizer",
        "byte_runs",
        "answer_stream",
        "light_tokenizer",
        "tokenizer",
        "chat_prompt",
        "tokenizer_document",
        "vocabulary",
    ),
    "common.text.answers": (
        "values",
        "deltas",
        "formats",
        "history",
        "reader",
        "json_calls",
        "xml_calls",
        "python_calls",
        "parser",
        "detection",
        "grammar_values",
        "grammar",
    ),
    "common.tiers": (
        "object_header",
        "secrets",
        "store",
        "host_memory",
        "mooncake",
        "folder_use",
        "folder",
        "folder_watch",
        "timed_reads",
        "catalogue",
    ),
    "common.transfer": (
        "codes",
        "sole_reference",
        "regions",
        "announcement",
        "reads",
        "backend",
        "jobs",
        "joint_puller",
        "generation_check",
        "pull",
        "poll_loop",
        "puller",
        "nixl",
        "testing",
    ),
    "common.transfer.nixl": ("bindings", "descriptors", "fresh_pages", "agent", "backend"),
    "proxy": (
        "metrics",
        "node_http",
        "nodes",
        "prefix_index",
        "placement",
        "admission",
        "dialects",
        "legs",
        "status",
        "pages",
        "http",
        "app",
        "simulation",
        "__main__",
    ),
    "proxy.simulation": ("speeds", "node", "cluster", "run"),
    "proxy.dialects": ("text_logprobs", "chat_answer", "conversion", "fields", "responses", "messages", "dialect"),
}
# A folder that is longer is two.
MAX_FILES = 12
# The parts that must run where torch, transformers and NIXL are not installed, and the modules in them that need not.
LIGHT = (
    "proxy",
    "common.engine.drafting",
    "common.engine.pacing",
    "common.engine.scheduling",
    "common.kv_cache",
    "common.tiers",
    "common.geometry",
    "common.simulate",
    "common.openai",
    "common.text",
    "common.wire",
    "common.server",
    "common.grammar",
    "common.images",
    "common.cli",
    "common.demo_model",
    "common.metrics",
    "common.telemetry",
    "common.errors",
    "common.config",
    "common.names",
)
LIGHT_EXCEPT = {"common.kv_cache.pools.storage"}
LIGHT_MODULES = (
    "common.engine.finished_prompts",
    "common.engine.live_sequences",
    "common.engine.outputs",
    "common.engine.plan",
    "common.engine.rates",
    "common.engine.remote_prefixes",
    "common.engine.scheduler",
    "common.engine.sequence",
    "common.engine.speculation",
    "common.request",
)


def modules() -> dict[str, Path]:
    """Dotted name -> file of every module of the four packages."""
    found = {}
    for package in OURS:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def imports(path: Path) -> tuple[str, ...]:
    """Dotted names that the file imports anywhere in it; relative ones come out as ``.``."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield "."
            else:
                # `from common import config` names a module, `from common.config import NodeConfig` does not: both
                # forms begin with a prefix that the table knows.
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _is_import_call(node):
            argument = node.args[0] if node.args else None
            yield argument.value if isinstance(argument, ast.Constant) else "?"


def _is_import_call(node: ast.Call) -> bool:
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
    return name in ("import_module", "__import__")


def is_within(name: str, part: str) -> bool:
    return name == part or name.startswith(part + ".")


def part_of(name: str) -> str | None:
    return next((part for part in ALLOWED if is_within(name, part)), None)


def module_of(imported: str) -> str:
    """The module that an imported name is, or is defined in."""
    return imported if imported in MODULES else imported.rpartition(".")[0]


MODULES = modules()


# One test for all modules: each takes less time than a test's own bookkeeping.
def test_modules_import_only_what_their_part_may() -> None:
    found = [problem for name in sorted(MODULES) for problem in problems_of(name)]
    assert not found, "\n".join(found)


def problems_of(name: str) -> Iterator[str]:
    part = part_of(name)
    if part is None and name != "common":
        yield f"{name} belongs to no part of the table"
    for imported in imports(MODULES[name]):
        if imported == ".":
            yield f"{name}: relative import"
        if not any(is_within(imported, each) for each in OURS):
            continue
        if part is None:
            yield f"{name} imports {imported}"
        elif not is_within(imported, part):
            allowed = ALLOWED[part] | {"common.errors"}
            if not any(is_within(imported, each) for each in allowed):
                yield f"{name} imports {imported}, not allowed in {part}"


def test_light_modules_import_nothing_heavy() -> None:
    light = [
        name
        for name in sorted(MODULES)
        if name in LIGHT_MODULES or (any(is_within(name, part) for part in LIGHT) and name not in LIGHT_EXCEPT)
    ]
    assert light
    found = [
        f"{name} imports {imported}"
        for name in light
        for imported in imports(MODULES[name])
        if any(is_within(imported, heavy) for heavy in HEAVY)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("part", sorted(ORDER))
def test_folder_imports_only_what_stands_before_it_in_its_part(part: str) -> None:
    order = ORDER[part]
    inside = {name: name.removeprefix(part + ".").split(".")[0] for name in MODULES if name.startswith(part + ".")}
    assert set(inside.values()) == set(order)
    for name, unit in inside.items():
        for imported in imports(MODULES[name]):
            if imported.startswith(part + "."):
                other = imported.removeprefix(part + ".").split(".")[0]
                assert order.index(other) <= order.index(unit), f"{name} imports {imported}"


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Modules of which each imports the next and the last one the first; empty when there is no circle."""
    done: set[str] = set()

    def visit(name: str, way: list[str]) -> list[str]:
        if name in way:
            return way[way.index(name) :]
        if name in done:
            return []
        found = next(filter(None, (visit(each, [*way, name]) for each in sorted(graph[name]))), [])
        done.add(name)
        return found

    return next(filter(None, (visit(name, []) for name in sorted(graph))), [])


def crowded(paths: Iterable[Path]) -> dict[str, int]:
    """Folders with more files than a folder may have beside its ``__init__.py``."""
    counts = Counter(path.parent for path in paths if path.name != "__init__.py")
    return {str(folder): count for folder, count in counts.items() if count > MAX_FILES}


def test_modules_when_followed_along_their_imports_then_no_way_leads_back() -> None:
    graph = {
        name: {module_of(each) for each in imports(path)} & MODULES.keys() - {name} for name, path in MODULES.items()
    }
    assert circle(graph) == []
    # One import more, from the lowest module that imports anything back up to who imports it, is found.
    low = "common.kv_cache.coordinator"
    high = next(name for name in sorted(graph) if low in graph[name])
    assert set(circle({**graph, low: graph[low] | {high}})) >= {low, high}


def test_folder_has_at_most_a_dozen_files() -> None:
    assert crowded(MODULES.values()) == {}
    one_more = [ROOT / "proxy" / "legs" / f"another_{number}.py" for number in range(MAX_FILES + 1)]
    assert list(crowded(one_more)) == [str(ROOT / "proxy" / "legs")]


def test_part_when_it_has_folders_then_their_order_is_in_the_table() -> None:
    packages = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    parents = {name.rpartition(".")[0] for name in packages} - {"", "common"}
    assert parents - ORDER.keys() == set()


def test_ops_imports_torch_and_the_standard_library_only() -> None:
    for name, path in MODULES.items():
        if is_within(name, "common.ops"):
            for imported in imports(path):
                assert not is_within(imported, "transformers"), f"{name} imports {imported}"
                assert not is_within(imported, "nixl"), f"{name} imports {imported}"


def test_table_when_an_import_is_indented_then_it_is_read(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text(
        "def f():\n    if True:\n        from proxy.app import create_app\n"
        "    importlib.import_module('decode_node')\n    import torch.nn\n"
    )
    assert sorted(imports(source)) == ["decode_node", "proxy.app.create_app", "torch.nn"]


def test_every_directory_with_modules_is_a_package() -> None:
    for path in MODULES.values():
        assert (path.parent / "__init__.py").exists(), f"{path.parent} has no __init__.py"
