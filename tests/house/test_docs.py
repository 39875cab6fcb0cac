"""The pages tell the truth: their code runs, and what they refer to exists."""

from __future__ import annotations

import importlib
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
from foreign_packages import declare_image_operators

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GUIDES = runpy.run_path(str(ROOT / "docs" / "guides" / "try_guide.py"))
PAPERS = sorted((ROOT / "docs" / "papers").glob("*_*.md"))


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """(line, source) of every fenced block in that language. `python` is run, `py` is only shown."""
    text = page.read_text(encoding="utf-8")
    fences = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)
    return [(text[: fence.start(1)].count("\n"), fence[1]) for fence in fences]


def references(page: Path) -> Iterator[tuple[str, str]]:
    """(file, dotted name) of every `natgrad/file.py: name`."""
    yield from re.findall(r"`((?:natgrad|lab/natgrad_lab)/[\w/]+\.py): ([\w.]+)`", page.read_text(encoding="utf-8"))


def needed_packages(page: Path) -> list[str]:
    """What the code of a page imports besides the library's own requirements: `<!-- needs: lightning -->`."""
    found = re.match(r"<!-- needs: ([\w, ]+) -->", page.read_text(encoding="utf-8"))
    return [] if found is None else found[1].split(", ")


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python") and not needed_packages(p)], ids=name_of)
def test_code_on_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run_page(page, tmp_path, monkeypatch)


@pytest.mark.filterwarnings(
    "ignore"
)  # theirs; sent between test processes, they would be imported in the other one too
@pytest.mark.parametrize("page", [p for p in PAGES if needed_packages(p)], ids=name_of)
def test_code_with_other_packages_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    declare_image_operators()
    for package in needed_packages(page):
        pytest.importorskip(package)
    run_page(page, tmp_path, monkeypatch)


@pytest.mark.parametrize("page", [p for p in PAGES if needed_packages(p)], ids=name_of)
def test_a_page_says_what_to_install(page: Path):
    installed = " ".join(GUIDES["read_packages"](page.read_text(encoding="utf-8")))
    assert [package for package in needed_packages(page) if package not in installed] == []


def test_a_guide_is_run_whole_and_by_its_name():
    page = ROOT / "docs" / "guides" / "lightning.md"
    assert GUIDES["find_page"]("lightning") == GUIDES["find_page"]("guides/lightning") == page
    program = GUIDES["join_code"](page.read_text(encoding="utf-8")).splitlines()
    written = page.read_text(encoding="utf-8").splitlines()
    lines = [i for i, line in enumerate(program) if line]
    assert [program[i] for i in lines] == [written[i] for i in lines]
    assert [line for line in program if "Trainer(" in line] == [line for line in written if "Trainer(" in line]
    with pytest.raises(SystemExit, match=r"named .lightening. with code to run: expected one of accelerate, "):
        GUIDES["find_page"]("lightening")


def run_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the blocks of a page in order, as a reader types them, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    for line, source in blocks(page, "python"):
        exec(compile("\n" * line + source, page, "exec", dont_inherit=True), names)


@pytest.mark.parametrize("page", PAPERS, ids=name_of)
def test_a_paper_s_table_refers_to_what_exists(page: Path):
    found = list(references(page))
    assert found, f"{page.name} refers to no function"
    for file, dotted in found:
        thing: object = importlib.import_module(file.removeprefix("lab/").removesuffix(".py").replace("/", "."))
        assert (ROOT / file).is_file()
        for part in dotted.split("."):
            assert hasattr(thing, part), f"{page.name}: {file} has no {dotted}"
            thing = getattr(thing, part)


def leads_somewhere(target: Path) -> bool:
    """Whether it is a file, or the page that the site makes of a tutorial: the gallery, or a Python file's."""
    in_tutorials = target.parent.resolve() == ROOT / "docs" / "tutorials"
    return target.exists() or (in_tutorials and (target.stem == "index" or target.with_suffix(".py").exists()))


def test_relative_links_lead_somewhere():
    links = [
        (page, target)
        for page in PAGES
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)", page.read_text(encoding="utf-8"))
        if "://" not in target
    ]
    assert [f"{name_of(page)}: {t}" for page, t in links if not leads_somewhere(page.parent / t)] == []


def test_make_commands_exist_and_ci_runs_only_what_the_readme_names():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {page: set(re.findall(r"(?:^|`)make ([a-z]+)", page.read_text(), re.M)) for page in PAGES}
    assert set.union(*named.values()) <= targets
    ci = set(re.findall(r"^make ([a-z]+)", (ROOT / ".ci" / "run").read_text(), re.M))
    assert "test" in ci
    assert ci <= named[ROOT / "README.md"]
