# ruff: noqa: E501 - answers stand as models write them
"""Answers as models write them, and what they are: one entry for each kind of thing that goes right or wrong."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from common.text.answers.formats import TOOL_FORMATS, AnswerFormat, ReasoningFormat, ToolTypes

TOOLS: tuple[dict[str, Any], ...] = tuple(
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in {
        "weather": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "share": {"type": "number"},
                "hourly": {"type": "boolean"},
                "unit": {"type": ["string", "null"]},
                "places": {"type": "array", "items": {"type": "string"}},
                "where": {"$ref": "#/$defs/where"},
                "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            },
            "required": ["city"],
            "$defs": {"where": {"type": "object", "properties": {"lat": {"type": "number"}}}},
        },
        "write": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
        "now": {"type": "object", "properties": {}},
        "typed": {
            "type": "object",
            "properties": {"a": {"type": "float"}, "b": {"type": "dict"}, "c": {"type": "int"}},
        },
    }.items()
)
TYPES = ToolTypes.of(TOOLS)


@dataclass(frozen=True)
class Case:
    """``calls``: name and arguments, which are JSON values, or text where they must not be read. ``is_open``: the last
    call is cut."""

    name: str
    kind: str
    text: str
    calls: list[tuple[str, Any]] = field(default_factory=list)
    content: str = ""
    reasoning: str = ""
    in_reasoning: bool = False
    is_open: bool = False
    call_ids: list[str] | None = None

    @property
    def answer_format(self) -> AnswerFormat:
        return AnswerFormat(TOOL_FORMATS[self.kind], ReasoningFormat())


BERN = ("weather", {"city": "Bern"})
_JSON = '{"name": "weather", "arguments": {"city": "Bern"}}'
_XML = "<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n</function>\n</tool_call>"
_WRITE = "<tool_call>\n<function=write>\n<parameter=path>\na.py\n</parameter>\n<parameter=text>\n{}\n</parameter>\n</function>\n</tool_call>"
_LFM = "<|tool_call_start|>[{}]<|tool_call_end|>"
_SECTION = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
_KIMI = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
_DEEP = {"a": [{"b": {"c": ["]}", '"', "\\"]}}], "d": None, "e": -1.5e3, "f": True}

CASES: tuple[Case, ...] = (
    # --- text alone
    Case("plain", "hermes", "Just text, no call.", content="Just text, no call."),
    Case("empty", "hermes", ""),
    Case("space alone", "hermes", "  \n ", content="  \n "),
    Case("angle brackets", "hermes", "a < b <to <tool <tool_cal", content="a < b <to <tool <tool_cal"),
    Case("marker at the end", "hermes", "so: <tool_call>", content="so: <tool_call>"),
    Case("marker quoted", "hermes", "Write <tool_call> first.", content="Write <tool_call> first."),
    Case("json without marker", "hermes", _JSON, content=_JSON),
    # --- JSON
    Case("one", "hermes", f"<tool_call>\n{_JSON}\n</tool_call>", [BERN]),
    Case("no line breaks", "hermes", f"<tool_call>{_JSON}</tool_call>", [BERN]),
    Case("text before", "hermes", f"Let me look.\n\n<tool_call>\n{_JSON}\n</tool_call>", [BERN], "Let me look."),
    Case("text after", "hermes", f"<tool_call>\n{_JSON}\n</tool_call>\nDone.", [BERN], "\nDone."),
    Case("two", "hermes", f"<tool_call>\n{_JSON}\n</tool_call>\n<tool_call>\n{_JSON}\n</tool_call>", [BERN, BERN]),
    Case("two in one marker", "hermes", f"<tool_call>\n{_JSON}\n{_JSON}\n</tool_call>", [BERN, BERN]),
    Case("list", "falcon_h1", f"<tool_call>\n[{_JSON}, {_JSON}]\n</tool_call>", [BERN, BERN]),
    Case("list without marker's end", "nemotron_json", f"<TOOLCALL>[{_JSON}]", [BERN]),
    Case("list of one", "nemotron_json", f"<TOOLCALL>[{_JSON}]</TOOLCALL>", [BERN]),
    Case("lines", "jamba", f"<tool_calls>[\n    {_JSON},\n    {_JSON}\n]</tool_calls>", [BERN, BERN]),
    Case("empty list", "nemotron_json", "<TOOLCALL>[]</TOOLCALL>", [], "<TOOLCALL>[]</TOOLCALL>"),
    Case("no arguments", "hermes", '<tool_call>{"name": "now"}</tool_call>', [("now", {})]),
    Case("empty arguments", "hermes", '<tool_call>{"name": "now", "arguments": {}}</tool_call>', [("now", {})]),
    Case("null arguments", "hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', [("now", {})]),
    Case(
        "deep arguments", "hermes",
        f'<tool_call>{json.dumps({"name": "any", "arguments": _DEEP})}</tool_call>', [("any", _DEEP)],
    ),
    Case(
        "arguments first", "hermes",
        '<tool_call>{"arguments": {"city": "Bern"}, "name": "weather"}</tool_call>', [BERN],
    ),
    Case(
        "arguments as text", "granite",
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Bern\\"}"}</tool_call>', [BERN],
    ),
    Case(
        "arguments that are a word", "granite",
        '<tool_call>{"name": "weather", "arguments": "Bern"}</tool_call>', [("weather", "Bern")],
    ),
    Case("parameters", "hermes", '<tool_call>{"name": "weather", "parameters": {"city": "Bern"}}</tool_call>', [BERN]),
    Case(
        "other keys", "hermes",
        '<tool_call>{"id": 7, "type": {"a": ["}"]}, "name": "weather", "arguments": {"city": "Bern"}, "z": 1}</tool_call>',
        [BERN],
    ),
    Case(
        "markers in a string", "hermes",
        '<tool_call>{"name": "write", "arguments": {"text": "</tool_call> <tool_call> \\" }"}}</tool_call>',
        [("write", {"text": '</tool_call> <tool_call> " }'})],
    ),
    Case(
        "escapes and other scripts", "hermes",
        '<tool_call>{"name": "write", "arguments": {"text": "\\u00e9\\n\\t日本 👩‍👧 \\\\"}}</tool_call>',
        [("write", {"text": "é\n\t日本 👩‍👧 \\"})],
    ),
    Case(
        "pretty", "hermes",
        '<tool_call>\n{\n  "name": "weather",\n  "arguments": {\n    "city": "Bern"\n  }\n}\n</tool_call>', [BERN],
    ),
    Case("bracket missing", "hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}</tool_call>', [BERN]),
    Case(
        "both brackets missing", "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "Bern"</tool_call>',
        [("weather", '{"city": "Bern"')], is_open=True,
    ),
    Case("cut in a name", "hermes", '<tool_call>{"name": "wea', [], '<tool_call>{"name": "wea'),
    Case(
        "cut in a string", "hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Be',
        [("weather", '{"city": "Be')], is_open=True,
    ),
    Case(
        "cut in an escape", "hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Be\\',
        [("weather", '{"city": "Be')], is_open=True,
    ),
    Case("cut after a name", "hermes", '<tool_call>{"name": "weather"', [("weather", "")], is_open=True),
    Case("cut after the arguments", "hermes", f"<tool_call>{_JSON[:-1]}", [("weather", '{"city": "Bern"}')], is_open=True),
    Case("no JSON", "hermes", "<tool_call>weather(Bern)</tool_call>", [], "<tool_call>weather(Bern)</tool_call>"),
    Case("no name", "hermes", '<tool_call>{"city": "Bern"}</tool_call>', [], '<tool_call>{"city": "Bern"}</tool_call>'),
    Case("empty name", "hermes", '<tool_call>{"name": ""}</tool_call>', [], '<tool_call>{"name": ""}</tool_call>'),
    Case("a number for a name", "hermes", '<tool_call>{"name": 5}</tool_call>', [], '<tool_call>{"name": 5}</tool_call>'),
    Case(
        "a call after what was none", "hermes", f"<tool_call>no<tool_call>{_JSON}</tool_call>", [BERN], "<tool_call>no",
    ),
    Case("a second that is none", "hermes", f'<tool_call>{_JSON}, {{"x": 1}}</tool_call>', [BERN], '{"x": 1}</tool_call>'),
    Case("text between", "hermes", f"One:\n<tool_call>{_JSON}</tool_call> then\n<tool_call>{_JSON}</tool_call> end", [BERN, BERN], "One: then end"),
    Case("end missing", "hermes", f"<tool_call>\n{_JSON}", [BERN]),
    Case("end twice", "hermes", f"<tool_call>{_JSON}</tool_call>\n</tool_call>Done.", [BERN], "Done."),
    Case("beginning missing", "hermes", f"{_JSON}</tool_call>", [], f"{_JSON}</tool_call>"),
    Case("a bracket too many", "hermes", f"<tool_call>{_JSON}}}</tool_call>", [BERN]),
    Case("comma missing", "hermes", '<tool_call>{"name": "weather" "arguments": {"city": "Bern"}}</tool_call>', [BERN]),
    Case(
        "a key called name", "hermes", '<tool_call>{"arguments": {"name": "x"}, "name": "write"}</tool_call>',
        [("write", {"name": "x"})],
    ),
    Case("empty text for arguments", "granite", '<tool_call>{"name": "now", "arguments": ""}</tool_call>', [("now", {})]),
    Case(
        "separators in a string", "hermes",
        '<tool_call>{"name": "write", "arguments": {"text": "a, b; {c} [d]"}}, {"name": "now", "arguments": {}}</tool_call>',
        [("write", {"text": "a, b; {c} [d]"}), ("now", {})],
    ),
    Case(
        "large numbers and other scripts in names", "hermes",
        '<tool_call>{"name": "é.b-c", "arguments": {"n": 12345678901234567890}}</tool_call>',
        [("é.b-c", {"n": 12345678901234567890})],
    ),
    Case(
        "Python's quotation marks", "hermes", "<tool_call>{'name': 'now', 'arguments': {}}</tool_call>", [],
        "<tool_call>{'name': 'now', 'arguments': {}}</tool_call>",
    ),
    Case("blanks around, text for arguments", "granite4", '<tool_call> {"name": "weather", "arguments": "{\\"city\\": \\"Bern\\"}"} </tool_call> ', [BERN]),
    Case("one without a list", "nemotron_json", f"<TOOLCALL>{_JSON}</TOOLCALL>", [BERN]),
    Case("list and call not closed", "nemotron_json", '<TOOLCALL>[{"name": "now", "arguments": {}</TOOLCALL>', [("now", {})]),
    Case("list ends in a comma", "jamba", f" <tool_calls>[\n    {_JSON},\n]</tool_calls>", [BERN]),
    # --- XML
    Case("xml", "qwen3_coder", _XML, [BERN]),
    Case("xml in one line", "qwen3_coder", _XML.replace("\n", ""), [BERN]),
    Case("xml after text", "qwen3_coder", f"I look.\n\n{_XML}", [BERN], "I look."),
    Case("xml twice", "qwen3_coder", f"{_XML}\n{_XML}", [BERN, BERN]),
    Case("xml without outer marker", "qwen3_coder", _XML[12:-13], [BERN]),
    Case("xml no parameters", "qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", [("now", {})]),
    Case(
        "xml types", "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "<parameter=share>\n0.50\n</parameter>\n<parameter=hourly>\nTrue\n</parameter>\n<parameter=unit>\nnull\n"
        "</parameter>\n<parameter=places>\n[\"a\", 'b']\n</parameter>\n<parameter=where>\n{'lat': 1.5}\n</parameter>\n"
        "<parameter=limit>\nNone\n</parameter>\n</function>\n</tool_call>",
        [("weather", {"city": "12", "days": 3, "share": 0.5, "hourly": True, "unit": None, "places": ["a", "b"],
                      "where": {"lat": 1.5}, "limit": None})],
    ),
    Case(
        "xml types that do not fit", "qwen3_coder",
        "<tool_call><function=weather><parameter=days>soon</parameter><parameter=hourly>yes</parameter>"
        "<parameter=other>5</parameter></function></tool_call>",
        [("weather", {"days": "soon", "hourly": "yes", "other": "5"})],
    ),
    Case(
        "xml unknown function", "qwen3_coder",
        "<tool_call><function=other><parameter=a>\n[1]\n</parameter></function></tool_call>", [("other", {"a": "[1]"})],
    ),
    Case(
        "xml text of many lines", "qwen3_coder",
        "<tool_call>\n<function=write>\n<parameter=text>\n\nif a < b:\n\treturn \"</p>\"\n\n</parameter>\n</function>\n</tool_call>",
        [("write", {"text": '\nif a < b:\n\treturn "</p>"\n'})],
    ),
    Case(
        "xml empty text", "qwen3_coder",
        "<tool_call>\n<function=write>\n<parameter=text>\n</parameter>\n</function>\n</tool_call>", [("write", {"text": ""})],
    ),
    Case(
        "xml closing tag missing", "qwen3_coder",
        "<tool_call>\n<function=write>\n<parameter=path>\na.py\n<parameter=text>\nx\n</parameter>\n</function>\n</tool_call>",
        [("write", {"path": "a.py", "text": "x"})],
    ),
    Case(
        "xml last closing tag missing", "qwen3_coder",
        "<tool_call>\n<function=write>\n<parameter=path>\na.py\n</function>\n</tool_call>", [("write", {"path": "a.py"})],
    ),
    Case(
        "xml cut in a value", "qwen3_coder", "<tool_call>\n<function=write>\n<parameter=path>\na\n</para",
        [("write", '{"path": "a')], is_open=True,
    ),
    Case("xml cut in a name", "qwen3_coder", "<tool_call>\n<function=wri", [], "<tool_call>\n<function=wri"),
    Case(
        "xml function's end missing", "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n</tool_call>", [BERN],
    ),
    Case("xml text between and after", "qwen3_coder", f"{_XML} and\n{_XML}\nDone.", [BERN, BERN], " and\nDone."),
    Case("xml first marker missing", "qwen3_coder", f"I look.\n\n{_XML[12:]}", [BERN], "I look."),
    Case("xml outer end missing", "qwen3_coder", _XML[:-12], [BERN]),
    Case("xml ends twice", "qwen3_coder", f"{_XML}</function>\n</tool_call>", [BERN]),
    Case("xml two in one marker", "qwen3_coder", _XML.replace("\n</tool_call>", "\n<function=now>\n</function>\n</tool_call>"), [BERN, ("now", {})]),
    Case("xml bracket of a name missing", "qwen3_coder", _XML.replace("weather>", "weather"), [BERN]),
    Case("xml empty marker", "qwen3_coder", "<tool_call>\n</tool_call>\nok", [], "<tool_call>\n</tool_call>\nok"),
    Case(
        "xml entities and tags in a text", "qwen3_coder",
        "<tool_call><function=write><parameter=text>a &lt; b <function=x> </function> <tool_call> 日本 \\ \"</parameter></function></tool_call>",
        [("write", {"text": 'a &lt; b <function=x> </function> <tool_call> 日本 \\ "'})],
    ),
    Case(
        "xml values of other spellings", "qwen3_coder",
        "<tool_call><function=weather><parameter=days>007</parameter><parameter=hourly>TRUE</parameter>"
        "<parameter=where>{\"lat\": 1,\n \"x\": {\"y\": [1, null]}}</parameter><parameter=unit>None</parameter></function></tool_call>",
        [("weather", {"days": 7, "hourly": True, "where": {"lat": 1, "x": {"y": [1, None]}}, "unit": None})],
    ),
    Case(
        "xml broken object", "qwen3_coder", "<tool_call><function=weather><parameter=where>{\"lat\": 1</parameter></function></tool_call>",
        [("weather", {"where": '{"lat": 1'})],
    ),
    Case("xml text before a parameter", "qwen3_coder", _XML.replace("<parameter", "I ask.\n<parameter"), [BERN]),
    Case("xml text between parameters", "qwen3_coder", _XML.replace("</parameter>", "</parameter>\n<parameter=days>\n3\n</parameter> so"), [("weather", {"city": "Bern", "days": 3})]),
    Case("xml name of a template", "qwen3_coder", _XML.replace("weather", "{{ tool.name }}") + _XML, [BERN], _XML.replace("weather", "{{ tool.name }}")),
    Case("xml quoted without a call", "qwen3_coder", f"As <tool_call>x</tool_call>. Now:\n{_XML}", [BERN], "As <tool_call>x</tool_call>. Now:"),
    Case("xml strings of every kind", "qwen3_coder", _WRITE.format('"foo" \n\n    42 </param> &amp; \\n'), [("write", {"path": "a.py", "text": '"foo" \n\n    42 </param> &amp; \\n'})]),
    Case("xml closing tags in a text", "qwen3_coder", _WRITE.format('x = "</parameter>", "</function>"\n</parameter>;'), [("write", {"path": "a.py", "text": 'x = "</parameter>", "</function>"\n</parameter>;'})]),
    Case("xml parameters in a text", "qwen3_coder", _WRITE.format('d = """\n<parameter=path>\nb\n</parameter>\n"""'), [("write", {"path": "a.py", "text": 'd = """\n<parameter=path>\nb\n</parameter>\n"""'})]),
    Case("xml whole calls in a text", "qwen3_coder", _WRITE.format(f'd = """\n{_WRITE.format("b")}\n"""') + f"\n{_XML}", [("write", {"path": "a.py", "text": f'd = """\n{_WRITE.format("b")}\n"""'}), BERN]),
    Case("xml texts cut at a closing tag", "qwen3_coder", _WRITE.format("b")[:-24], [("write", '{"path": "a.py", "text": "b"')], is_open=True),
    Case("xml closing tag missing before a text", "qwen3_coder", _XML.replace("</parameter>\n", "") + "\nDone.", [BERN], "\nDone."),
    Case("xml scalar twice", "qwen3_coder", _XML.replace("city>\nBern", "days>\n3\n</parameter>\n<parameter=days>\n4"), [("weather", {"days": 4})]),
    Case("xml types in other words", "qwen3_coder", "<tool_call><function=typed><parameter=a>1.5</parameter><parameter=b>{'x': 1}</parameter><parameter=c>2</parameter></function></tool_call>", [("typed", {"a": 1.5, "b": {"x": 1}, "c": 2})]),
    Case("xml object in quotation marks", "qwen3_coder", _XML.replace("city>\nBern", "where>\n\"{'lat': 1}\""), [("weather", {"where": {"lat": 1}})]),
    Case("xml one of two types", "qwen3_coder", _XML.replace("city>\nBern", "unit>\n42\n</parameter>\n<parameter=limit>\n2 francs"), [("weather", {"unit": "42", "limit": "2 francs"})]),
    # --- Python
    Case("python", "lfm2", _LFM.format('weather(city="Bern")'), [BERN]),
    Case("python with text after", "lfm2", _LFM.format("weather(city='Bern')") + "One moment.", [BERN], "One moment."),
    Case("python two", "lfm2", _LFM.format('weather(city="Bern"), now()'), [BERN, ("now", {})]),
    Case(
        "python values", "lfm2",
        _LFM.format("f(a=1, b=-2.5, c=True, d=None, e=[1, 'x', {'y': (2,)}], g={\"h\": null}, i=false, j='', k=1e3)"),
        [("f", {"a": 1, "b": -2.5, "c": True, "d": None, "e": [1, "x", {"y": [2]}], "g": {"h": None}, "i": False,
                "j": "", "k": 1000.0})],
    ),
    Case(
        "python strings", "lfm2", _LFM.format("f(a='it\\'s', b=\"say \\\"x\\\"\", c='a, b) c', d='it's', e=\"]\")"),
        [("f", {"a": "it's", "b": 'say "x"', "c": "a, b) c", "d": "it's", "e": "]"})],
    ),
    Case("python dotted name", "lfm2", _LFM.format("math.sum(a=1)"), [("math.sum", {"a": 1})]),
    Case("python no list", "lfm2", "<|tool_call_start|>now()<|tool_call_end|>", [("now", {})]),
    Case("python that is JSON", "lfm2", _LFM.format(_JSON), [BERN]),
    Case("python no call", "lfm2", _LFM.format("hello"), [], _LFM.format("hello")),
    Case("python cut", "lfm2", "<|tool_call_start|>[f(a=1, b='x", [("f", '{"a": 1, "b": ')], is_open=True),
    Case("python value without a name", "lfm2", _LFM.format("weather('Bern', days=3, 0.5)"), [("weather", {"city": "Bern", "days": 3, "share": 0.5})]),
    Case("python value without a name, of what is not known", "lfm2", _LFM.format("f(1), now()"), [], _LFM.format("f(1), now()")),
    Case("python values without a name behind the last", "lfm2", _LFM.format("f(a=1, 2), write('a', 'b', [3])"), [("f", {"a": 1}), ("write", {"path": "a", "text": "b"})]),
    Case("python value without a name, cut", "lfm2", "<|tool_call_start|>[weather('Be", [("weather", "")], is_open=True),
    Case("python nested words", "lfm2", _LFM.format("f(a={\"x\": true, \"y\": [None, {'z': False}]}, b=(1, 2))"), [("f", {"a": {"x": True, "y": [None, {"z": False}]}, "b": [1, 2]})]),
    Case("python said twice", "lfm2", _LFM.format("weather(city='Bern')") + _LFM[19:].format("weather(city='Bern')") + "\nok", [BERN], "\nok"),
    Case("python list behind a call", "lfm2", _LFM.format("now()") + "[a](b), [f(x) and more]", [("now", {})], "[a](b), [f(x) and more]"),
    Case("python links", "lfm2", "See [text](url), [a](https://b.c) and f(x=1).", [], "See [text](url), [a](https://b.c) and f(x=1)."),
    Case("a python call in a thought", "lfm2", "<think>so " + _LFM.format("now()") + " hm</think>" + _LFM.format("now()"), [("now", {})], "", "so " + _LFM.format("now()") + " hm"),
    Case("python between texts", "lfm2", "I look. " + _LFM.format("now()") + "\nDone.", [("now", {})], "I look.\nDone."),
    Case("python two blocks", "lfm2", _LFM.format("now()") + " and " + _LFM.format("weather(city='Bern')"), [("now", {}), BERN], " and"),
    Case("python blanks", "lfm2", "<|tool_call_start|> [weather( city = 'Bern' ,)\nnow()] <|tool_call_end|>", [BERN, ("now", {})]),
    Case("python end missing", "lfm2", "<|tool_call_start|>[weather(city='Bern')]", [BERN]),
    Case("python end twice", "lfm2", _LFM.format("now()") + "<|tool_call_end|>", [("now", {})]),
    Case("python empty list", "lfm2", _LFM.format(" "), [], _LFM.format(" ")),
    Case(
        "python values of other spellings", "lfm2", _LFM.format("f(a=07, b=+7, c={'x', 'y'}, d={}, e=[], from=1)"),
        [("f", {"a": 7, "b": 7, "c": ["x", "y"], "d": {}, "e": [], "from": 1})],
    ),
    Case(
        "python no literal", "lfm2", _LFM.format("now(), bad(x=b'z', y=1+2), weather(city='Bern')"),
        [("now", {}), ("bad", {"x": "b'z'", "y": "1+2"}), BERN],
    ),
    Case(
        "python shell commands", "lfm2",
        _LFM.format("sh(c='sed -n '1,5p' a.py'), sh(c='cat > f << E\nx = \"]\"\nE'), sh(c='python -c \"p(m='\\,')\"')"),
        [("sh", {"c": "sed -n '1,5p' a.py"}), ("sh", {"c": 'cat > f << E\nx = "]"\nE'}), ("sh", {"c": "python -c \"p(m='\\,')\""})],
    ),
    Case(
        "python escapes", "lfm2", _LFM.format("f(a=\"\\d+\", b='\\d\\n', c=\"it\\'s \\\"x\\\"\", d='''x''', e='a\x00b', g='C:\\new')"),
        [("f", {"a": "\\d+", "b": "\\d\n", "c": "it's \"x\"", "d": "x", "e": "a\x00b", "g": "C:\new"})],
    ),
    Case(
        "python list of JSON, other key", "lfm2", _LFM.format('{"name": "weather", "parameters": {"city": "Bern"}}, {"name": "now"}'),
        [BERN, ("now", {})],
    ),
    Case("python quotation mark of two meanings", "lfm2", _LFM.format("weather(city='say 'hi', unit='x')"), [("weather", {"city": "say 'hi", "unit": "x"})]),
    # --- Kimi
    Case(
        "kimi", "kimi_k2", _SECTION.format(_KIMI.format("functions.weather:0", '{"city": "Bern"}')), [BERN],
        call_ids=["functions.weather:0"],
    ),
    Case(
        "kimi two after text", "kimi_k2",
        "Both. " + _SECTION.format(_KIMI.format("functions.weather:3", '{"city": "Bern"}') + _KIMI.format("now:4", "{}")),
        [BERN, ("now", {})], "Both.", call_ids=["functions.weather:3", "now:4"],
    ),
    Case(
        "kimi spaces", "kimi_k2",
        _SECTION.format("\n" + _KIMI.format(" functions.weather:0 ", ' {"city": "Bern"} \n') + "\n"), [BERN],
    ),
    Case("kimi empty section", "kimi_k2", _SECTION.format(""), [], _SECTION.format("")),
    Case(
        "kimi cut", "kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{",
        [("now", "{")], is_open=True,
    ),
    Case(
        "kimi marker in a string", "kimi_k2",
        _SECTION.format(_KIMI.format("functions.write:0", '{"text": "<|tool"}')), [("write", {"text": "<|tool"})],
    ),
    Case("kimi text between and after", "kimi_k2", _SECTION.format("so " + _KIMI.format("functions.now:0 ", "{} ")) + " Done.", [("now", {})], " Done."),
    Case("kimi two sections", "kimi_k2", _SECTION.format(_KIMI.format("functions.now:0", "{}")) * 2, [("now", {}), ("now", {})]),
    Case("kimi end missing", "kimi_k2", _SECTION.format(_KIMI.format("functions.now:0", "{}"))[:-26], [("now", {})]),
    Case("kimi call's end missing", "kimi_k2", _SECTION.format(_KIMI.format("functions.now:0", "{}")[:-17]), [("now", {})]),
    Case("kimi no arguments", "kimi_k2", _SECTION.format(_KIMI.format("functions.now:0", "")), [("now", {})]),
    Case(
        "kimi names", "kimi_k2", _SECTION.format(_KIMI.format("functions.a.b-c:12", '{\n "x": "<b>"\n}')), [("a.b-c", {"x": "<b>"})],
        call_ids=["functions.a.b-c:12"],
    ),
    Case("kimi call in a thought", "kimi_k2", "<think>Hm. " + _SECTION.format(_KIMI.format("functions.now:0", "{}")), [("now", {})], "", "Hm."),
    Case("kimi numbers", "kimi_k2", _SECTION.format(_KIMI.format("functions.now.0", "{}") + _KIMI.format("1", "{}")), [("now.0", {}), ("1", {})]),
    Case("kimi other section", "kimi_k2", "<|tool_call_section_begin|>x", [], "<|tool_call_section_begin|>x"),
    Case("kimi call without section", "kimi_k2", "So: " + _KIMI.format("functions.now:0", "{}") + " ok", [("now", {})], "So: ok"),
    Case("kimi without section and ends, in a thought", "kimi_k2", "<think>Two.\n" + "".join(_KIMI.format(f"functions.now:{n}", '{"a": 1}')[:-17] for n in (0, 1)), [("now", {"a": 1})] * 2, "", "Two.", call_ids=["functions.now:0", "functions.now:1"]),
    Case("kimi argument that is cut", "kimi_k2", _KIMI.format("functions.now:0", '{"a": "}')[:-17], [("now", '{"a": "}')], is_open=True),
    Case("kimi no name", "kimi_k2", _SECTION.format(_KIMI.format("", "{}")), [], _SECTION.format(_KIMI.format("", "{}"))),
    Case("kimi marker alone", "kimi_k2", "a <|tool_call_begin|> b", [], "a <|tool_call_begin|> b"),
    # --- reasoning
    Case("thought", "hermes", "<think>\nHm.\n</think>\n\nYes.", [], "Yes.", "Hm."),
    Case("thought, opened by the prompt", "hermes", "Hm.\n</think>\n\nYes.", [], "Yes.", "Hm.", in_reasoning=True),
    Case("thought, opened twice", "hermes", "<think>Hm.</think>Yes.", [], "Yes.", "Hm.", in_reasoning=True),
    Case("thought alone", "hermes", "Hm. I", [], "", "Hm. I", in_reasoning=True),
    Case("no thought", "hermes", "</think>Yes.", [], "Yes.", "", in_reasoning=True),
    Case("empty thought", "hermes", "<think>\n\n</think>\n\nYes.", [], "Yes.", ""),
    Case("thought of many lines", "hermes", "<think>\na\n\nb < c </thin\n</think>\nd", [], "d", "a\n\nb < c </thin"),
    Case("thought and nothing", "hermes", "<think>Hm.</think>", [], "", "Hm."),
    Case("thought ended twice", "hermes", "Hm.</think>a</think>b", [], "a</think>b", "Hm.", in_reasoning=True),
    Case("thoughts twice", "hermes", "<think>a</think>\n<think>b</think>c", [], "<think>b</think>c", "a"),
    Case("thought's beginning missing", "hermes", "Hm.</think>Yes.", [], "Hm.</think>Yes."),
    Case("thought's marker alone", "hermes", "<think>", [], "", ""),
    Case("a JSON call in a thought", "hermes", f"Hm. <tool_call>{_JSON}</tool_call></think>ok", [], "ok", f"Hm. <tool_call>{_JSON}</tool_call>", True),
    Case("thought later on", "hermes", "Yes <think>no</think>", [], "Yes <think>no</think>"),
    Case("thought, then a call", "hermes", f"Hm.\n</think>\n\n<tool_call>\n{_JSON}\n</tool_call>", [BERN], "", "Hm.", True),
    Case(
        "a marker in a thought", "hermes", "say <tool_call>{}</tool_call></think>ok", [], "ok",
        "say <tool_call>{}</tool_call>", in_reasoning=True,
    ),
    Case("a call in a thought", "qwen3_coder", f"Hm.\n{_XML}\n</think>\nok", [BERN], "ok", "Hm.", in_reasoning=True),
    Case("a call that ends a thought", "qwen3_coder", f"Hm.\n\n{_XML}", [BERN], "", "Hm.", in_reasoning=True),
    Case(
        "a marker in an XML thought", "qwen3_coder", "use <tool_call> then</think>ok", [], "ok", "use <tool_call> then",
        in_reasoning=True,
    ),
)  # fmt: skip
