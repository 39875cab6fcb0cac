"""What the hooks of the site promise: formulas name functions, links lead somewhere, nothing comes from elsewhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

if importlib.util.find_spec("mkdocs") is None:
    pytest.skip("the site's packages are the extra `docs`", allow_module_level=True)

import docstrings
import equations
import griffe
import name_links
import names
import page_formulas
import self_contained
from docstring_formulas import typeset_docstring
from mkdocs.exceptions import PluginError

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
THEORY = [page for page in sorted((ROOT / "docs" / "theory").glob("*.md")) if page.stem != "index"]


def find_displayed(page: Path) -> list[str]:
    """The formulas of a page that stand on lines of their own."""
    return re.findall(r"^\$\$\n(.*?)\n\$\$$", page.read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.parametrize("page", [p for p in PAGES if find_displayed(p)], ids=lambda p: p.stem)
def test_what_a_formula_names_exists_and_the_formula_can_be_drawn(page: Path):
    for latex in find_displayed(page):
        formula, references = equations.split_references(latex)
        for file, dotted in references:
            assert names.find_line(file, dotted), f"{page.name} names {file}: {dotted}, and there is no such name"
        if page in THEORY:
            assert references, f"no function beside this formula of {page.name}: {formula}"
        drawn = equations.render_equation(latex, 1, "theory/page.html")
        assert "<math" in drawn
        assert "%" not in drawn


@pytest.mark.parametrize("page", THEORY, ids=lambda p: p.stem)
def test_no_formula_is_left_as_plain_text(page: Path):
    text = page.read_text(encoding="utf-8")
    plain = [
        block for block in re.findall(r"^```text\n(.*?)^```$", text, re.M | re.S) if "^T" in block or "<-" in block
    ]
    assert not plain, f"{page.name}: write this as $$ ... $$: {plain[0]}"


@pytest.mark.parametrize("place", ["optimizer.NaturalGradient.__init__", "recipes.kfac"])
def test_keywords_stand_one_by_one_where_the_source_has_options(place: str):
    module, name = place.split(".", 1)
    tree = griffe.visit(module, ROOT / f"natgrad/optim/{module}.py", (ROOT / f"natgrad/optim/{module}.py").read_text())
    tree.parent = griffe.Module("natgrad.optim")
    docstrings.list_options(tree)
    function = tree[name]
    docstring = (function.parent if name.endswith("__init__") else function).docstring
    assert {"rule", "damping"} < {p.name for p in function.parameters}
    assert not any("Options" in str(p.annotation) for p in function.parameters)
    assert "Options" not in docstring.value
    assert function.parameters["train_in_eval"].default == "False"


PLACES = {
    "ng.kfac": "api/optim/kfac.html#natgrad.optim.recipes.kfac",
    "ng.kfac(model, criterion)": "api/optim/kfac.html#natgrad.optim.recipes.kfac",
    "natgrad.rules.NoiseAware": "api/rules.html#natgrad.rules.NoiseAware",
    "ng.rules": "api/rules.html",
    "ng.no_such_name": None,
    "kfac": None,
}
UNTOUCHED = ("<a href='x'><code>ng.kfac</code></a>", "<h2><code>ng.kfac</code></h2>", "<pre><code>ng.kfac</code></pre>")


def test_names_become_links_outside_of_links_headings_and_blocks():
    for written, place in PLACES.items():
        assert names.find_anchor(written) == place
    page = "<p><code>ng.kfac</code> and <code>natgrad/rules/damping.py: Constant</code></p>"
    linked = name_links.SPAN.sub(lambda found: name_links.link_code(found, "theory/step.html"), page)
    assert 'href="../api/optim/kfac.html#natgrad.optim.recipes.kfac"' in linked
    line = names.find_line("natgrad/rules/damping.py", "Constant")
    assert f'href="../source/natgrad/rules/damping.py.html#L-{line}"' in linked
    for untouched in UNTOUCHED:
        assert name_links.SPAN.sub(lambda found: name_links.link_code(found, "index.html"), untouched) == untouched
    assert f'id="L-{line}"' in name_links.show_source("natgrad/rules/damping.py")


REQUESTS = """
<script src="https://cdn.example/x.js"></script>
<img src=//cdn.example/x.png>
<link rel="stylesheet" href="https://cdn.example/x.css">
<link href="https://cdn.example" rel=preconnect>
@import url('https://cdn.example/x.css');
src: url(https://cdn.example/font.woff2)
"""


@pytest.mark.parametrize("text", REQUESTS.strip().splitlines())
def test_requests_to_elsewhere_are_seen(text: str):
    assert self_contained.find_requests(text)


FORMULAS: dict[str, str | None] = {
    "the step (G + damping I)^-1 g is": r"the step $( G + \mathrm{damping} \, I ) ^{- 1} g$ is",
    "| `x` | U U^T | 2 x_i x_j |": r"| `x` | $U U ^{T}$ | $2 x_{i} x_{j}$ |",
    "in `U U^T`, $U U^T$ and [a](x.md#u-u^t)": None,
    "```python\ny = x^2 + a_i\n```": None,
    "## What U U^T is": None,
    "at least 1/2 d^T |H| d": r"at least $1 / 2 d ^{T} | H | d$",
    "x - 3 x² and d √N": None,
    "on Rosenbrock, 10-d, a (1+1)-EA of rank 3": None,
    "- a *model* says *no*, **x = 1**": None,
}


@pytest.mark.parametrize(("plain", "typeset"), FORMULAS.items())
def test_formulas_of_pages_are_typeset(plain: str, typeset: str | None):
    assert page_formulas.typeset_page(plain) == (typeset or plain)


def test_formulas_of_pages_can_be_drawn():
    pages = [page for page in PAGES if str(page.relative_to(ROOT / "docs")).startswith(page_formulas.FOLDERS)]
    texts = [page_formulas.typeset_page(page.read_text(encoding="utf-8")) for page in pages]
    formulas = {latex for text in texts for latex in re.findall(r"(?<![$\\])\$([^$\n]+)\$(?!\$)", text)}
    assert len(formulas) > 300
    assert all("<math" in equations.draw_formula(latex, "inline") for latex in formulas)


@pytest.mark.parametrize("content", [r"<td>$\min</td><td>x$</td>", r'<span class="arithmatex">\(d = \arg b\)</span>'])
def test_a_formula_that_would_be_shown_as_source_stops_the_site(content):
    with pytest.raises(PluginError, match=r"vert|does not know"):
        equations.on_page_content(content, SimpleNamespace(url="theory/page.html"))
    equations.on_page_content(r"<code>$\min</code> \(x\)", SimpleNamespace(url="theory/page.html"))


# formulas in docstrings are found in plain text, and the rest stays as it is


def write_without_spaces(text: str) -> str:
    return re.sub(r"\s+(?=[^A-Za-z])|(?<=[^A-Za-z])\s+", "", text)


TYPESET = {
    "Largest a with 1/2 (a d)^T G (a d) <= radius, so": r"with$1/2(a d)^{T}G(a d)\le\mathrm{radius}$,so",
    "so a = sqrt(2 radius / d^T G d).": r"so$a=\sqrt{2\,\mathrm{radius}/d^{T}G d}$.",
    "E_x E_{y ~ p(y|x)} [grad log p]": r"$\mathrm{E}_{x}\mathrm{E}_{y \sim p(y|x)}[\nabla\,\log\,p]$",
    "a root U (n, r), G = U U^T.": "U(n,r),$G=U U^{T}$.",
    "D = 2 <l> + const of <s|H|s>": "D = 2 &lt;l> + const of &lt;s|H|s>",
    "Args:\n    tau: >= 1, any\n        > 0.": "tau: &gt;= 1, any\n        &gt; 0.",
    "v <- decay * v + proposal; v": r"$v\leftarrow\mathrm{decay}\cdot v+\mathrm{proposal}$;v",
    "S (x) A per layer, KL(q || p)": r"$S\otimes A$per layer,$\mathrm{KL}(q\|p)$",
    "sum_{i < j} J_ij w'_i, A^-1/2": r"$\sum_{i < j}J_{ij}w'_{i}$,$A^{-1/2}$",
    "of lambda_max / 2, dx_i and (t - s)^(n + 1)": r"$\lambda_{\max}/2$,$d x_{i}$and$(t-s)^{n+1}$",
}


@pytest.mark.parametrize(("written", "shown"), TYPESET.items())
def test_formulas_are_typeset(written: str, shown: str):
    assert write_without_spaces(shown) in write_without_spaces(typeset_docstring(written))


@pytest.mark.parametrize(
    "text",
    [
        "A step is v, of shape (n,) or (n, k).",
        "As in K-FAC, lr=0.1, log_p(params, x) and opt.step(); a lattice of 3 by 4.",
        "Half of model(x) / 2 and p(x | the others)^2: what is not understood stays whole.",
        "`x_i = 2 y`\n\nExample:\n    >>> a = b + c\n    >>> a - 2 * b\n    3",
        "Args:\n    x: A number > 0.\n    x_i: The layer's.",
        "With two derivatives\n\n    G = U U^T\n    x = G^-1 b\n\nby rows.",
    ],
)
def test_prose_and_code_stay(text: str):
    assert typeset_docstring(text) == text
