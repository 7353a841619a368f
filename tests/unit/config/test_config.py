"""The flag table: what argv and environment become, what is refused, and how it is written back."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.cli.flags import UpConfig, parse_up
from common.config.command_line import flag_table, parse_config, to_argv
from common.config.flag import flags_of
from common.config.key_file import read_key_file
from common.config.node import NodeConfig, parse_node_config
from common.config.process import ProcessConfig
from common.config.proxy import ProxyConfig
from common.config.values import (
    PriorityTargets,
    format_size,
    parse_int,
    parse_priority_targets,
    parse_seconds,
    parse_share,
    parse_size,
)
from common.errors import ConfigError
from common.kv_cache.eviction.base import EVICTION_POLICIES
from common.kv_cache.planner import MAMBA_CACHE_MODES


def node(*argv: str, **environ: str) -> NodeConfig:
    return parse_node_config(["--model", "m", *argv], environ, role="prefill", default_port=8100)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("2GiB", 2 << 30), ("512 MiB", 512 << 20), ("1.5gib", 3 << 29), ("1000", 1000), ("1kb", 1000), ("7B", 7)],
)
def test_parse_size_when_valid_then_bytes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1.2.3", "2QiB", "1e9", "nan"])
def test_parse_size_when_invalid_then_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)


@given(st.integers(min_value=0, max_value=1 << 50))
def test_format_size_then_parse_size_gives_the_same(num_bytes: int) -> None:
    assert parse_size(format_size(num_bytes)) == num_bytes


def test_node_when_nothing_else_is_given_then_documented_defaults() -> None:
    config = node()
    assert (config.port, config.block_size, config.kv_cache_memory) == (8100, 16, None)
    assert (config.max_num_batched_tokens, config.max_num_seqs, config.max_queue) == (2048, 64, 256)
    assert (config.kv_lease_seconds, config.kv_transfer_timeout_seconds) == (30.0, 30.0)
    assert (config.local_prefill_limit, config.kv_transfer_verify) == (None, "off")
    assert config.max_body_bytes == 16 << 20
    assert config.node_name == "prefill-8100"
    assert node("--port", "0").node_name is None  # to be made when the port is known
    assert config.enable_prefix_caching
    assert config.peers == ()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--local-prefill-limit", "-1"], "--local-prefill-limit -1 is below its minimum of 0"),
        (
            ["--local-prefill-limit", "512", "--kv-load-failure-policy", "fail"],
            "--local-prefill-limit 512 bounds what is computed here, but --kv-load-failure-policy is fail",
        ),
        (["--kv-transfer-verify", "some"], "--kv-transfer-verify some is not one of off, sample, all"),
        (["--kv-tier", "disk:/a"], "--kv-tier 'disk:/a' is not a tier such as host:64GiB, disk:/path?size=500GiB, "),
        (["--kv-tier", "disk:/a?size=many"], "--kv-tier 'disk:/a?size=many' is not a tier: its size is not a size"),
        (
            ["--kv-tier", "host:1GiB", "host:2GiB"],
            "--kv-tier host:2GiB: there is another tier of kind host, at most one of each is possible",
        ),
        (
            ["--kv-tier", "shared:/a?size=1GiB"],
            "--kv-tier shared:/a?size=1GiB: a shared folder needs --cluster-key-file",
        ),
        (
            ["--kv-tier", "mooncake:a:50051?size=1GiB"],
            "--kv-tier mooncake:a:50051?size=1GiB&lend=1GiB&admin=9003: a store that nodes share needs --cluster-key-",
        ),
        (["--kv-tier", "mooncake:a?size=1GiB"], "--kv-tier 'mooncake:a?size=1GiB' is not a tier such as "),
        (
            ["--kv-tier", "disk:/a?size=1GiB", "disk:/b?size=1GiB"],
            "--kv-tier disk:/b?size=1GiB: there is another tier of kind disk, at most one of each is possible",
        ),
        (
            ["--kv-tier", "disk:/a?size=1GiB", "--no-enable-prefix-caching"],
            "--kv-tier disk:/a?size=1GiB: with --no-enable-prefix-caching nothing is kept that could be written",
        ),
        (["--tensor-parallel-size", "0"], "--tensor-parallel-size 0 is below its minimum of 1"),
        (["--tensor-parallel-size", "65"], "--tensor-parallel-size 65 is above its maximum of 64"),
        (
            ["--tensor-parallel-size", "2", "--device", "cuda:0"],
            "--tensor-parallel-size 2 does not go with --device cuda:0",
        ),
        (
            ["--tensor-parallel-size", "2", "--kv-tier", "host:1GiB"],
            "--tensor-parallel-size 2 does not go with --kv-tier",
        ),
        (
            ["--tensor-parallel-size", "2", "--async-scheduling"],
            "--tensor-parallel-size 2 does not go with --async-scheduling",
        ),
        (["--kv-tier-min-return", "2"], "--kv-tier-min-return 2.0 is above its maximum of 1.0"),
        (["--kv-tier-write-rate", "0"], "--kv-tier-write-rate 0 is below its minimum of 1"),
    ],
)
def test_transfer_flags_when_out_of_bounds_then_error_names_flag_and_value(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        node(*argv)


def test_environment_when_flag_is_given_too_then_the_flag_wins() -> None:
    assert node(TANDEM_MAX_NUM_SEQS="7").max_num_seqs == 7
    assert node("--max-num-seqs", "9", TANDEM_MAX_NUM_SEQS="7").max_num_seqs == 9


def test_environment_when_variable_is_unknown_or_empty_then_ignored() -> None:
    assert node(TANDEM_NO_SUCH_THING="1", TANDEM_MAX_NUM_SEQS="").max_num_seqs == 64


def test_environment_when_value_is_bad_then_error_names_the_variable() -> None:
    with pytest.raises(ConfigError, match=r"--max-num-seqs \(from TANDEM_MAX_NUM_SEQS\) 'many' is not a whole number"):
        node(TANDEM_MAX_NUM_SEQS="many")


@pytest.mark.parametrize(
    ("word", "value"), [("true", True), ("1", True), ("ON", True), ("false", False), ("0", False), ("no", False)]
)
def test_environment_when_flag_is_boolean_then_words_are_read(word: str, value: bool) -> None:
    assert node(TANDEM_ENABLE_PREFIX_CACHING=word).enable_prefix_caching is value


def test_environment_when_flag_is_a_list_then_spaces_and_commas_part_it() -> None:
    assert node(TANDEM_PEERS="http://a:1, http://b:2").peers == ("http://a:1", "http://b:2")


def test_boolean_when_negated_then_off() -> None:
    assert not node("--no-enable-prefix-caching").enable_prefix_caching


@pytest.mark.parametrize("argv", [["--no-such-flag"], ["--max-num", "1"], ["positional"], ["--api-key", "secret"]])
def test_argv_when_a_flag_is_unknown_then_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        node(*argv)
    assert exit_info.value.code == 2
    said = capsys.readouterr().err
    assert "error: unrecognized arguments" in said
    assert said.endswith("--help` lists flags\n")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-num-seqs", "0"], "--max-num-seqs 0 is below its minimum of 1"),
        (["--port", "70000"], "--port 70000 is above its maximum of 65535"),
        (["--block-size", "1025"], "--block-size 1025 is above its maximum of 1024"),
        (["--max-body-bytes", "1000"], "--max-body-bytes 1000 is below its minimum of 1KiB"),
        (["--kv-cache-memory", "lots"], "--kv-cache-memory 'lots' is not a size"),
        (["--dtype", "int8"], "--dtype int8 is not one of auto, float32, bfloat16, float16"),
        (["--mamba-cache-mode", "some"], "--mamba-cache-mode some is not one of auto, align, all, none"),
        (["--peers", "example"], "--peers 'example' is not a base URL"),
        (["--peers", "http://h:99999"], "--peers 'http://h:99999' is"),
        (["--kv-lease-seconds", "inf"], "--kv-lease-seconds 'inf' is not a number of seconds"),
        (["--max-num-batched-tokens", "0"], "--max-num-batched-tokens 0 is below its minimum of 1"),
        (
            ["--prefix-cache-retention-interval", "72"],
            "--prefix-cache-retention-interval 72 is not a multiple of --block-size 16",
        ),
        (["--prefix-cache-retention-interval", "-64"], "--prefix-cache-retention-interval -64 is below its minimum"),
        (["--state-memory-share", "1.5"], "--state-memory-share 1.5 is above its maximum of 0.99"),
        (["--state-memory-share", "half"], "--state-memory-share 'half' is not a number"),
        (["--node-name", "north 1"], "--node-name 'north 1' is not a name of 1 to 247 of the characters A-Z a-z 0-9"),
        (["--node-name", "mühle"], "--node-name 'mühle' is not a name of 1 to 247 of the characters"),
        (["--node-name", "n" * 248], f"--node-name {'n' * 248!r} is not a name of 1 to 247 of the characters"),
        (["--node-name", ""], "--node-name '' is not a name of 1 to 247 of the characters"),
        (["--advertise-host", "http://a"], "--advertise-host 'http://a' is not a host name or an IP address without "),
        (["--advertise-host", "10.0.0.1:8100"], "--advertise-host '10.0.0.1:8100' is not a host name or an IP"),
        (["--advertise-host", "[fd00::7]"], "--advertise-host '[fd00::7]' is not a host name or an IP address"),
        (["--advertise-host", "mühle"], "--advertise-host 'mühle' is not a host name or an IP address"),
        (["--advertise-host", "a" * 254], f"--advertise-host {'a' * 254!r} is not a host name or an IP address"),
    ],
)
def test_value_when_out_of_bounds_then_error_names_flag_value_and_bound(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        node(*argv)
    assert error.value.message.startswith(message)
    assert error.value.param == argv[0]


@pytest.mark.parametrize(
    "config", [NodeConfig(model="m"), ProxyConfig(decode=("http://d:1",)), UpConfig()], ids=["node", "proxy", "up"]
)
def test_every_flag_when_beyond_a_bound_then_error_names_it_with_value_and_bound(config: Any) -> None:
    for each in flags_of(type(config)):
        beyond: dict[Any, Any] = {"none of them": ", ".join(each.choices)} if each.choices else {}
        for bound, step in ((each.minimum, -1), (each.maximum, 1)):
            if bound is not None:
                each.check(bound)
                beyond[bound + step] = each.format(bound)
        assert beyond or each.parse not in NUMBERS, each.option
        for value, bound in beyond.items():
            with pytest.raises(ConfigError) as caught:
                dataclasses.replace(config, **{each.name: value})
            assert caught.value.param == each.option
            shown = value if each.choices else each.format(value)
            assert caught.value.message.startswith(f"{each.option} {shown} is ")
            assert caught.value.message.endswith(bound)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500:40@-1", PriorityTargets(-1, 500, 40)),
        (" :100@+5 ", PriorityTargets(5, None, 100)),
        ("86400000:@0", PriorityTargets(0, 86_400_000, None)),
    ],
)
def test_priority_targets_when_valid_then_read_and_written_the_same(text: str, expected: PriorityTargets) -> None:
    assert parse_priority_targets(text) == expected
    assert parse_priority_targets(str(expected)) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["500@1"], "--priority-targets '500@1' is not TTFT:ITL@PRIORITY"),
        ([":@1"], "--priority-targets ':@1' is not TTFT:ITL@PRIORITY"),
        (
            ["0:40@1"],
            "--priority-targets '0:40@1' is out of bounds: a target is from 1 to 86400000 milliseconds, got 0",
        ),
        (["1:86400001@1"], "--priority-targets '1:86400001@1' is out of bounds: a target is from 1 to 86400000"),
        (["1:1@3000000000"], "--priority-targets '1:1@3000000000' is out of bounds: a priority is from -2147483648"),
        (["1:1@3", "2:2@3"], "--priority-targets has more than one rule for priority 3"),
    ],
)
def test_priority_targets_when_not_valid_then_error_names_flag_value_and_bound(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(ProxyConfig, ["--decode", "http://d:1", "--priority-targets", *words], {}, prog="test")
    assert error.value.message.startswith(message)
    assert error.value.param == "--priority-targets"


@pytest.mark.parametrize("host", ["node-1.example.org", "10.0.0.7", "fd00::7", "a" * 253])
def test_advertise_host_when_others_can_put_it_into_a_url_then_taken(host: str) -> None:
    assert node("--advertise-host", host).advertise_host == host


@pytest.mark.parametrize("block_size", [1, 16, 24, 1024])
def test_block_size_when_within_bounds_then_any_whole_number(block_size: int) -> None:
    assert node("--block-size", str(block_size)).block_size == block_size


def test_config_when_built_in_code_then_validated_too() -> None:
    with pytest.raises(ConfigError, match="--max-num-seqs 0 is below"):
        NodeConfig(model="m", max_num_seqs=0)
    with pytest.raises(ConfigError, match="--model is required"):
        NodeConfig()
    with pytest.raises(ConfigError, match="--decode is required"):
        ProxyConfig()


def test_config_when_frozen_then_not_assignable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        node().port = 1  # type: ignore[misc]


CHANGED_NODE = NodeConfig(
    model="-odd name",
    revision="r",
    trust_remote_code=True,
    enable_prefix_caching=False,
    max_model_len=100,
    kv_cache_memory=(1 << 30) + 1,
    kv_lease_seconds=0.123456789,
    peers=("http://a:1", "http://b:2"),
    node_name="n",
    api_key_file="/k",
    seed=5,
)


@pytest.mark.parametrize(
    "config",
    [
        CHANGED_NODE,
        NodeConfig(model="m"),
        ProxyConfig(
            decode=("http://d:1",),
            policy="least_loaded",
            allowed_media_domains=("example.org", "example.org:8443", "[2606:4700::1111]:443"),
            allowed_origins=("*", "http://localhost:3000"),
            priority_targets=(PriorityTargets(-1, 500, 40), PriorityTargets(5, None, 100)),
        ),
    ],
)
def test_to_argv_when_parsed_again_then_equal(config: NodeConfig | ProxyConfig) -> None:
    assert parse_config(type(config), to_argv(config), {}, prog="test") == config


def test_to_argv_when_environment_disagrees_then_argv_wins_for_every_given_flag() -> None:
    environ = {"TANDEM_SEED": "9", "TANDEM_ENABLE_PREFIX_CACHING": "1", "TANDEM_TRUST_REMOTE_CODE": "0"}
    assert parse_config(NodeConfig, to_argv(CHANGED_NODE), environ, prog="test") == CHANGED_NODE


@pytest.mark.parametrize("config_class", [NodeConfig, ProxyConfig])
def test_every_field_is_a_flag_and_in_the_table(config_class: type) -> None:
    flags = flags_of(config_class)
    shared = [field.name for field in dataclasses.fields(ProcessConfig)]
    own = [field.name for field in dataclasses.fields(config_class) if field.name not in shared]
    assert [each.name for each in flags] == own + shared
    table = flag_table(config_class)
    for each in flags:
        assert f"`{each.option}" in table
        assert each.help


def test_up_when_flags_are_shared_then_nodes_and_proxy_get_them() -> None:
    config = parse_up(
        ["--port", "9000", "--decode-nodes=2", "--log-level", "debug", "--max-num-seqs=8", "--policy", "least_loaded"],
        {"TANDEM_CLUSTER_KEY_FILE": "/key"},
    )
    nodes = config.node_configs("model")
    assert [(role, each.port, each.node_name) for role, each in nodes] == [
        ("prefill", 9100, "prefill-9100"),
        ("decode", 9200, "decode-9200"),
        ("decode", 9201, "decode-9201"),
    ]
    proxy = config.proxy_config()
    assert proxy.prefill == ("http://127.0.0.1:9100",)
    assert proxy.decode == ("http://127.0.0.1:9200", "http://127.0.0.1:9201")
    assert proxy.policy == "least_loaded"
    for each in (*(each for _, each in nodes), proxy):
        assert (each.log_level, each.cluster_key_file) == ("debug", "/key")
    assert {each.max_num_seqs for _, each in nodes} == {8}


NUMBERS = (parse_int, parse_seconds, parse_share, parse_size)
OTHERS_REACH = ("0.0.0.0", "::", "", "10.0.0.7", "node-1", "127.0.0.1.example.org", "localhost.example.org", "fe80::1")


def parsers() -> tuple[Callable[..., ProcessConfig], ...]:
    """Each process's configuration of argv and environment; of ``tandem up`` that of its proxy."""
    return (
        node,
        lambda *argv, **environ: parse_config(ProxyConfig, ["--decode=http://a", *argv], environ, prog="tandem proxy"),
        lambda *argv, **environ: parse_up(argv, environ).proxy_config(),
    )


@pytest.mark.parametrize("host", OTHERS_REACH)
def test_host_when_others_reach_it_then_needs_a_cluster_key_or_says_that_it_is_insecure(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    for parse in parsers():
        with pytest.raises(ConfigError) as caught:
            parse(f"--host={host}")
        assert caught.value.param == "--host"
        for part in (f"--host {host} ", "--cluster-key-file", "--insecure-internal"):
            assert part in caught.value.message
        keyed = parse(f"--host={host}", "--cluster-key-file=/key")
        assert (keyed.host, keyed.is_exposed) == (host, False)
        keyed.warn_if_exposed()
        assert not caplog.records
        for insecure in (
            parse(f"--host={host}", "--insecure-internal"),
            parse(f"--host={host}", TANDEM_INSECURE_INTERNAL="1"),
        ):
            assert (insecure.host, insecure.is_exposed) == (host, True)
            insecure.warn_if_exposed()
            [warning] = caplog.records
            assert warning.levelname == "WARNING"
            assert f"INSECURE: listening on {host} without --cluster-key-file" in warning.message
            caplog.clear()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_host_when_only_this_machine_reaches_it_then_needs_no_key(host: str, caplog: pytest.LogCaptureFixture) -> None:
    for parse in parsers():
        parse(f"--host={host}").warn_if_exposed()
    assert not caplog.records


@pytest.mark.parametrize(
    "word",
    [
        *("https://example.org", "example.org/images", "*.example.org", ".example.org", "a@example.org", "mühle.org"),
        *("example.org:0", "example.org:65536", "example.org:https", "example.org:", "[::1", "[1.2.3.4]", "fe80::1%a"),
    ],
)
def test_media_domain_when_it_is_no_host_then_error_names_flag_value_and_form(word: str) -> None:
    argv = ["--decode", "http://d:1", "--allowed-media-domains", "example.org", word]
    with pytest.raises(ConfigError) as caught:
        parse_config(ProxyConfig, argv, {}, prog="tandem proxy")
    assert caught.value.message.startswith(f"--allowed-media-domains {word!r} is not HOST or HOST:PORT in ASCII, ")
    assert caught.value.param == "--allowed-media-domains"


@pytest.mark.parametrize(
    "word",
    [
        *("app.example.org", "https://app.example.org/", "https://app.example.org/chat", "https://*.example.org"),
        *("https://a@example.org", "https://", "://example.org", "null", '["*"]', "http://x:0", "http://mühle.org"),
    ],
)
def test_origin_when_it_is_none_then_error_names_flag_value_and_form(word: str) -> None:
    argv = ["--decode", "http://d:1", "--allowed-origins", "https://example.org", word]
    with pytest.raises(ConfigError) as caught:
        parse_config(ProxyConfig, argv, {}, prog="tandem proxy")
    assert caught.value.message.startswith(f"--allowed-origins {word!r} is not * or SCHEME://HOST[:PORT] in ASCII, ")
    assert caught.value.param == "--allowed-origins"


def test_origin_when_it_can_be_written_otherwise_then_is_as_browsers_write_it() -> None:
    words = "HTTPS://App.example.org:443 http://x:80 http://x:443 http://[2606:4700:0::1111]:80 tauri://localhost *"
    config = parse_config(
        ProxyConfig, ["--decode", "http://d:1"], {"TANDEM_ALLOWED_ORIGINS": words}, prog="tandem proxy"
    )
    written = ("https://app.example.org", "http://x", "http://x:443", "http://[2606:4700::1111]", "tauri://localhost")
    assert config.allowed_origins == (*written, "*")


@pytest.mark.parametrize("url", ["http://a:8100", "dns+http://nodes:8100"])
def test_node_when_it_is_named_in_both_roles_then_refused_with_both_flags_and_its_url(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(ProxyConfig, ["--prefill", "http://b:1", f"{url}/", "--decode", url], {}, prog="tandem proxy")
    assert caught.value.message == f"--prefill and --decode both name {url}: a node has one role"
    assert caught.value.param == "--decode"


@pytest.mark.parametrize("certificate", [(), ("--ssl-certfile=",)])
def test_ssl_keyfile_when_there_is_no_certificate_then_refused_with_both_flags(certificate: tuple[str, ...]) -> None:
    for parse in parsers()[1:]:
        with pytest.raises(ConfigError) as caught:
            parse("--ssl-keyfile=/key.pem", *certificate)
        assert caught.value.param == "--ssl-keyfile"
        assert caught.value.message.startswith("--ssl-keyfile /key.pem has no --ssl-certfile beside it")
        parse("--ssl-keyfile=/key.pem", "--ssl-certfile=/chain.pem")
        parse("--ssl-certfile=/both.pem")


def test_up_when_it_is_open_to_others_then_every_process_is_told_and_nodes_stay_on_loopback() -> None:
    for argv, environ in (([], {"TANDEM_INSECURE_INTERNAL": "1"}), (["--insecure-internal"], {})):
        config = parse_up(["--host=0.0.0.0", *argv], environ)
        processes = [*(each for _, each in config.node_configs("m")), config.proxy_config()]
        assert all("--insecure-internal" in to_argv(each) for each in processes)
        assert [each.host for each in processes] == ["127.0.0.1", "127.0.0.1", "0.0.0.0"]


def test_up_when_a_node_flag_is_bad_then_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="--block-size 0 is below"):
        parse_up(["--block-size", "0"], {})


@pytest.mark.parametrize("option", ["--node-name", "--peers", "--advertise-host", "--decode"])
def test_up_when_given_a_flag_it_sets_itself_then_refused(option: str) -> None:
    with pytest.raises(SystemExit):
        parse_up([option, "http://x:1"], {})


def test_read_key_file_when_comments_and_blanks_then_keys_only(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\n\n one \ntwo\n")
    assert read_key_file(str(path), "--api-key-file") == ("one", "two")


@pytest.mark.parametrize("content", [None, b"# nothing\n", b"\xff\xfe"])
def test_read_key_file_when_unusable_then_error_names_flag_and_path(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"--api-key-file {path}"):
        read_key_file(str(path), "--api-key-file")


def test_choices_of_the_cache_flags_are_those_that_the_cache_has() -> None:
    flags = {each.name: each for each in flags_of(NodeConfig)}
    assert set(flags["mamba_cache_mode"].choices) == set(MAMBA_CACHE_MODES)
    assert flags["mamba_cache_mode"].default == MAMBA_CACHE_MODES[0]
    assert flags["eviction_policy"].choices == EVICTION_POLICIES
    assert flags["eviction_policy"].default == EVICTION_POLICIES[0]
