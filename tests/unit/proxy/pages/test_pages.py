"""The pages' routes and files: open to all, a policy that names no other host, nothing that parses text as HTML."""

from __future__ import annotations

import html.parser
import re
import shutil
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from common import demo_model
from proxy.pages import routes
from proxy.pages.routes import FILES, media_type_of
from proxy.status.routes import DATA_PATH
from tests.support.service import ROOT
from tests.unit.proxy.conftest import StartCluster

FOLDER = Path(routes.__file__).parent
PAGES = {path: name for path, name in FILES.items() if name.endswith(".html")}
SCRIPTS = sorted(name for name in FILES.values() if name.endswith(".js"))
STYLES = sorted(name for name in FILES.values() if name.endswith(".css"))
HAZARDS = (
    *(
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "DOMParser",
        "srcdoc",
        "createContextualFragment",
    ),
    *("eval(", "Function(", "localStorage", "document.cookie", "indexedDB", "javascript:"),
)


def read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def test_pages_when_asked_for_then_come_with_a_policy_that_names_no_other_host_and_need_no_key(
    start_cluster: StartCluster, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    client = start_cluster(wait=False, api_key_file=str(keys)).client
    for path, name in FILES.items():
        answer = client.get(path)
        assert answer.status_code == 200
        assert answer.text == read(name)
        assert answer.headers["content-type"].startswith(media_type_of(name))
        parts = [part.split() for part in answer.headers["content-security-policy"].split(";")]
        policy = {kind: sources for kind, *sources in parts}
        assert policy.pop("default-src") == ["'none'"]
        assert policy.pop("require-trusted-types-for") == ["'script'"]
        assert policy.pop("img-src") == ["'self'", "data:"]  # images that were dropped here are shown
        assert {source for sources in policy.values() for source in sources} == {"'self'", "'none'"}
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert client.get("/pages/other.js").status_code == 401


class Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.labelled: list[str] = []
        self.named_fields: set[str] = set()
        self.fields: set[str] = set()
        self.classes: set[str] = set()
        self.has_inline = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.links += [value for name, value in attrs if name in ("src", "href") and value]
        named = ("for", "aria-labelledby", "aria-describedby")
        self.labelled += [value for name, value in attrs if name in named and value]
        if tag in ("input", "textarea", "select"):
            self.fields.add(given["id"] or "")
            self.named_fields |= {given["id"] or ""} if "aria-label" in given else set()
        if tag == "label":
            self.named_fields.add(given["for"] or "")
        self.classes |= set((given.get("class") or "").split())
        self.has_inline |= "style" in given or any(name.startswith("on") for name in given)
        self.has_inline |= tag == "style" or (tag == "script" and "src" not in given)
        if tag not in ("meta", "link", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def scripts_of(tags: Tags) -> set[str]:
    """The page's script and all that it imports."""
    found: set[str] = set()
    left = [Path(link).name for link in tags.links if link.endswith(".js")]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += re.findall(r'from "\./([\w.]+)"', read(name))
    return found


@pytest.mark.parametrize("path", PAGES)
def test_page_when_read_then_is_well_formed_labels_its_fields_and_has_what_its_scripts_ask_for(path: str) -> None:
    tags = Tags()
    tags.feed(read(PAGES[path]))
    assert tags.open == []
    assert not tags.has_inline
    assert len(tags.ids) == len(set(tags.ids))
    # Relative, so that a proxy under a prefix of somebody's gateway works too.
    assert not any(link.startswith("/") for link in tags.links)
    assert {"/" + link.removeprefix("./") for link in tags.links} <= FILES.keys() | {DATA_PATH}
    assert set(tags.labelled) <= set(tags.ids)
    assert tags.fields <= tags.named_fields
    text = "".join(read(name) for name in scripts_of(tags))
    asked = set(re.findall(r'byId\("([\w-]+)"\)', text))
    assert len(asked) > 5
    assert asked <= set(tags.ids)
    styles = "".join(read(Path(link).name) for link in tags.links if link.endswith(".css"))
    assert {name for name in tags.classes if "." + name not in styles} == set()
    assert "prefers-color-scheme: dark" in styles


def test_files_when_read_then_name_no_other_host_and_parse_nothing_as_html() -> None:
    for name in (*PAGES.values(), *SCRIPTS, *STYLES):
        assert "://" not in read(name).replace("http://www.w3.org", ""), name
    for name in SCRIPTS:
        assert [each for each in HAZARDS if each in read(name)] == [], name
        assert {f"/pages/{each}" for each in re.findall(r'from "\./([\w.]+)"', read(name))} <= FILES.keys()
    for name in STYLES:
        assert read(name).count("{") == read(name).count("}")
        assert "@import" not in read(name)
        assert "url(" not in read(name)


def test_files_when_packaged_then_all_are_in_the_wheel() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["proxy.pages"]
    served = set(FILES.values())
    assert {name for name in served if not any(fnmatch(name, pattern) for pattern in patterns)} == set()
    assert served == {path.name for path in FOLDER.iterdir() if path.suffix not in (".py", "") and path.is_file()}


def test_chat_when_the_built_in_model_is_served_then_knows_its_name() -> None:
    assert f'BUILT_IN = "{demo_model.FOLDER.name}"' in read("chat.js")


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_when_parsed_then_is_javascript(name: str) -> None:
    if shutil.which("node") is None:
        pytest.skip("node is not installed; the tests in a browser, of the full tier, run the scripts")
    command = ["node", "--input-type=module", "--check"]
    result = subprocess.run(command, input=read(name), capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
