"""``python -m common.cli.docs``: write the tables of flags and metrics in ``docs/`` from the code that defines them.

The two files hold nothing else, so a test can compare them as a whole: a flag or metric that changed without its
documentation fails there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from common.cli.flags import UpConfig
from common.config.command_line import flag_table
from common.config.node import NodeConfig
from common.config.proxy import ProxyConfig
from common.metrics.labels import LABEL_VALUES, LabelValues
from common.metrics.table import METRICS, NODES, PREFIX, MetricSpec, Role
from common.openai.bodies.base import Body
from common.openai.bodies.models import AnswerFields, ChatBody, CompletionBody, PromptBody
from common.openai.bodies.unsupported import HARMLESS, UNSUPPORTED
from common.openai.openapi import ENDPOINTS, field_rows


class _Both(AnswerFields, PromptBody):
    """What completions and chats share."""


FOLDER = Path(__file__).resolve().parents[2] / "docs"
COMMAND = "python -m common.cli.docs"

_FLAGS_INTRODUCTION = """\
Every flag in these tables is also an environment variable: `--max-num-seqs` is `TANDEM_MAX_NUM_SEQS`. A flag wins over
its variable. Lists take several words (`--prefill URL URL`), in a variable they are separated by blanks or commas.
Sizes are written `512MiB`, `2GiB` or as bytes. Unknown flags are refused; a variable that names no flag is passed over
(only `TANDEM_TEST_HOOKS=1` acts: tests damage a node's transfers with it; never set it where clients are served), an
empty one counts as not set. A decode node's default port is 8200.

`tandem simulate` and `tandem bench` have flags of their own, which `--help` lists; they read no `TANDEM_` variables,
also not for flags with a name from these tables.
"""
_UP_INTRODUCTION = """\
It takes these, and hands every flag of the nodes and of the proxy on to the processes that it starts; addresses, ports,
names and `--prefill`/`--decode` it sets itself.
"""
_METRICS_INTRODUCTION = """\
Served at `/metrics` of every process, in the Prometheus text format. All names begin with `tandem_`, units are base
units (seconds, bytes, tokens), and every metric also has the label `role` (`prefill`, `decode` or `proxy`). Label
values come from small fixed sets. A histogram `NAME` appears as `NAME_bucket`, `NAME_sum` and `NAME_count`.
"""
_LABELS_INTRODUCTION = """
## Label values

A counter has no series for a reason that has not come up; errors of tiers have one for each, at 0, so that the first is
an increase. `route` is `completions`, `chat`, `responses` or `messages`, `policy` the value of `--policy`, `node` a
node's URL.
"""


def flags_document() -> str:
    """``docs/flags.md``."""
    sections = [
        _heading("Flags", _FLAGS_INTRODUCTION),
        f"## `tandem prefill` and `tandem decode`\n\n{flag_table(NodeConfig)}",
        f"## `tandem proxy`\n\n{flag_table(ProxyConfig)}",
        f"## `tandem up`\n\n{_UP_INTRODUCTION}\n{flag_table(UpConfig)}",
    ]
    return "\n".join(sections)


def metrics_document() -> str:
    """``docs/metrics.md``."""
    rows = ["| metric | kind | labels | on | meaning |", "|---|---|---|---|---|", *map(_metric_row, METRICS)]
    values = ["| label | of | values |", "|---|---|---|", *map(_label_row, LABEL_VALUES)]
    return "\n".join([_heading("Metrics", _METRICS_INTRODUCTION), *rows, _LABELS_INTRODUCTION, *values]) + "\n"


def api_document(text: str) -> str:
    """``docs/api.md``, which is ``text`` with its tables written anew: each is between two comments."""
    for name, table in _API_TABLES.items():
        begin, end = f"<!-- {name}: written by `{COMMAND}` -->", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{table()}\n{end}{rest.partition(end)[2]}"
    return text


def documents() -> dict[str, str]:
    """File name in ``docs/`` -> its text."""
    api = (FOLDER / "api.md").read_text(encoding="utf-8")
    return {"flags.md": flags_document(), "metrics.md": metrics_document(), "api.md": api_document(api)}


def _fields(*models: type[Body], without: type[Body] | None = None) -> str:
    rows = ["| field | type | of | here |", "|---|---|---|---|"]
    for model in models:
        left_out = without.model_fields if without is not None else {}
        rows += [
            f"| `{name}` | {kind} | {origin} | {meaning} |"
            for name, kind, origin, meaning in field_rows(model)
            if name not in left_out or model.model_fields[name].description != left_out[name].description
        ]
    return "\n".join(rows)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _endpoints() -> str:
    rows = ["| route | |", "|---|---|"]
    rows += [f"| `{'GET' if each.body is None else 'POST'} {each.path}` | {each.summary} |" for each in ENDPOINTS]
    return "\n".join(rows)


_API_TABLES: Mapping[str, Callable[[], str]] = {
    "endpoints": _endpoints,
    "fields of both": lambda: _fields(AnswerFields, PromptBody),
    "fields of completions": lambda: _fields(CompletionBody, without=_Both),
    "fields of chats": lambda: _fields(ChatBody, without=_Both),
    "refused fields": lambda: _names(UNSUPPORTED),
    "harmless fields": lambda: _names(sorted(HARMLESS)),
}


def _heading(title: str, introduction: str) -> str:
    return f"<!-- Written by `{COMMAND}`: change the code, then run it. -->\n\n# {title}\n\n{introduction}"


def _metric_row(spec: MetricSpec) -> str:
    labels = ", ".join(f"`{label}`" for label in spec.labels)
    return f"| `{PREFIX}{spec.name}` | {spec.kind.value} | {labels} | {_roles(spec.roles)} | {spec.help} |"


def _label_row(each: LabelValues) -> str:
    metrics = ", ".join(f"`{PREFIX}{name}`" for name in each.metrics)
    values = "; ".join(f"`{value}`: {meaning}" for value, meaning in each.values.items())
    return f"| `{each.label}` | {metrics} | {values} |"


def _roles(roles: frozenset[Role]) -> str:
    if roles == frozenset(Role):
        return "all"
    return "nodes" if roles == NODES else ", ".join(sorted(role.value for role in roles))


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    for name, text in documents().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
