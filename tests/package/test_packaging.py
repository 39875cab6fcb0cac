"""The package as others see it: links that lead somewhere, one version, annotations that are found from outside."""

from __future__ import annotations

import importlib.util
import re
import runpy
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import natgrad as ng

ROOT = Path(__file__).parents[2]


@pytest.fixture
def build_hook(monkeypatch) -> ModuleType:
    """hatch_build.py without hatchling, which only a build has."""
    interface = ModuleType("hatchling.metadata.plugin.interface")
    interface.MetadataHookInterface = object  # type: ignore[attr-defined]
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fill(build_hook: ModuleType) -> dict[str, object]:
    hook = build_hook.CustomMetadataHook()
    hook.root = str(ROOT)
    found: dict[str, object] = {}
    hook.update(found)
    return found


def test_relative_links_become_absolute_and_others_stay(build_hook):
    text = '![a](docs/a.png) [b](docs/b.md#c) [d](https://e.org) [f](#g) <img src="h.png"> [![i](j.svg)](k.md)'
    found = build_hook.link_absolutely(text, "https://r", "https://p")
    assert found == (
        "![a](https://r/docs/a.png) [b](https://p/docs/b.md#c) [d](https://e.org) [f](#g) "
        '<img src="https://r/h.png"> [![i](https://r/j.svg)](https://p/k.md)'
    )


def test_a_release_s_readme_has_no_relative_link(build_hook, monkeypatch):
    monkeypatch.setenv("GITHUB_REPOSITORY", "someone/natgrad")
    monkeypatch.setenv("GITHUB_REF_NAME", "v0.1.0")
    found = fill(build_hook)
    links = re.findall(r"\]\(([^)\s]+)", found["readme"]["text"])
    assert links
    assert all(re.match("https?:|mailto:|#", link) for link in links)
    assert found["urls"]["Source"] == "https://github.com/someone/natgrad"


def test_a_build_elsewhere_names_no_repository(build_hook, monkeypatch):
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    found = fill(build_hook)
    assert found["urls"] == {}
    assert found["readme"]["text"] == (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("folder", [".", "lab"])
def test_a_source_archive_has_all_that_a_wheel_is_built_from(folder, build_hook, monkeypatch, tmp_path):
    table = tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))
    included = table["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert all(one.startswith("/") and (ROOT / folder / one[1:]).exists() for one in included)
    if folder == ".":
        for one in included:
            if (ROOT / one[1:]).is_file():
                (tmp_path / one[1:]).write_bytes((ROOT / one[1:]).read_bytes())
        monkeypatch.setitem(fill.__globals__, "ROOT", tmp_path)
        assert "ng.kfac" in fill(build_hook)["readme"]["text"]


def test_there_is_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    lab = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["hatch"]["version"]["path"] == "natgrad/__init__.py"
    assert lab["project"]["version"] == ng.__version__
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {ng.__version__}\n" in citation
    date = re.search(r"\ndate-released: (\S+)\n", citation)
    assert date is not None
    assert f"\n## [{ng.__version__}] - {date[1]}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_workflows_are_read_and_name_what_exists():
    yaml = pytest.importorskip("yaml")
    paths = sorted((ROOT / ".github").rglob("*.yml"))
    assert len(paths) >= 5
    for path in paths:
        assert yaml.safe_load(path.read_text(encoding="utf-8"))
    text = (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    torch = next(one for one in project["dependencies"] if one.startswith("torch"))
    assert f'"torch=={torch.removeprefix("torch>=")}.*"' in text
    for folder in re.findall(r"tests/\w+", text):
        assert (ROOT / folder).is_dir()
    supported = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert re.search(r"python: (\[.*\])", text)[1] == str(supported).replace("'", '"')
    assert project["requires-python"] == f">={supported[0]}"


def test_workflows_call_what_the_makefile_calls():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = {}
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        commands[path.stem] = re.findall(r"^ *- run: (.+)$", path.read_text(encoding="utf-8"), re.M)
        for target in re.findall(r"make (\w+)", "\n".join(commands[path.stem])):
            assert f"\n{target}:" in makefile
    assert commands["docs"] == ["make docs"]
    assert commands["package"] == ["make package"]
    tests = next(one for one in commands["tests"] if one.startswith("python -m pytest -n auto --dist"))
    assert f"$(BIN)/{tests} $(ARGS)" in makefile


def test_a_user_s_program_runs(capsys):
    runpy.run_path(str(ROOT / "tests" / "package" / "user_program.py"))
    assert ng.__version__ in capsys.readouterr().out
