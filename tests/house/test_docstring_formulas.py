"""What the site makes of the formulas in docstrings: they are found in plain text, and the rest stays as it is."""

from __future__ import annotations

import importlib.util
import re

import pytest

if importlib.util.find_spec("latex2mathml") is None:
    pytest.skip("the site's packages are the extra `docs`", allow_module_level=True)

from docstring_formulas import typeset_docstring


def write_without_spaces(text: str) -> str:
    return re.sub(r"\s+(?=[^A-Za-z])|(?<=[^A-Za-z])\s+", "", text)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("Largest a with 1/2 (a d)^T G (a d) <= radius, so", r"with$1/2(a d)^{T}G(a d)\le\mathrm{radius}$,so"),
        ("so a = sqrt(2 radius / d^T G d).", r"so$a=\sqrt{2\,\mathrm{radius}/d^{T}G d}$."),
        ("E_x E_{y ~ p(y|x)} [grad log p]", r"$\mathrm{E}_{x}\mathrm{E}_{y \sim p(y|x)}[\nabla\,\log\,p]$"),
        ("a root U (n, r), G = U U^T.", "U(n,r),$G=U U^{T}$."),
        ("D = 2 <l> + const of <s|H|s>", "D = 2 &lt;l> + const of &lt;s|H|s>"),
        ("v <- decay * v + proposal; v", r"$v\leftarrow\mathrm{decay}\cdot v+\mathrm{proposal}$;v"),
        ("S (x) A per layer, KL(q || p)", r"$S\otimes A$per layer,$\mathrm{KL}(q\|p)$"),
        ("sum_{i < j} J_ij w'_i, A^-1/2", r"$\sum_{i < j}J_{ij}w'_{i}$,$A^{-1/2}$"),
        ("of lambda_max / 2, dx_i and (t - s)^(n + 1)", r"$\lambda_{\max}/2$,$d x_{i}$and$(t-s)^{n+1}$"),
    ],
)
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
