r"""For mkdocs: mathematics as MathML, which browsers draw by themselves; equations have a number, and name a function.

A comment of LaTeX at the end of a displayed formula names the function that computes it, by file and name:

    $$
    x = (G + \lambda I)^{-1} b
    % natgrad/solvers/base.py: Solver.solve
    $$
"""

from __future__ import annotations

import html
import itertools
import re
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url
from names import REFERENCE, find_anchor_in, find_line
from source_pages import source_url

PLACES = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.S)
"""What `pymdownx.arithmatex` makes of $...$ and $$...$$."""
ENDS = tuple("=≤≥<>≈→←+−-,;⊗×")
"""Signs after which a line may end."""
UNKNOWN = re.compile(r"\\[a-zA-Z]+")
"""A command that was left as it is."""
LEFT = re.compile(r"<(code|pre|script)\b.*?</\1>|(\$\\[^<$]*)", re.S)
"""Code, which may say anything; and behind it a formula that Markdown did not see as one."""
ElementTree.register_namespace("", "http://www.w3.org/1998/Math/MathML")
WHOLE = 12
"""Formulas of up to so many letters stay whole."""


def on_page_content(content: str, page: Page, **_: Any) -> str:
    """The page's HTML with every formula as MathML, and the displayed ones numbered.

    Args:
        content: HTML.
        page: Whose content it is.
        **_: What else mkdocs passes.

    Raises:
        PluginError: If a formula names a function that does not exist, or was cut, as by a bar within a table.
    """
    cut = [found[2] for found in LEFT.finditer(content) if found[2]]
    if cut:
        raise PluginError(f"{page.url} shows {cut[0]!r}, expected a formula: in a table, write \\vert for a bar")
    numbers = itertools.count(1)

    def render(place: re.Match[str]) -> str:
        latex = html.unescape(place[2]).strip()
        if place[1] == "span":
            return f'<span class="formula">{allow_breaks(draw_formula(latex, "inline"))}</span>'
        return render_equation(latex, next(numbers), page.url)

    return PLACES.sub(render, content)


def render_equation(latex: str, number: int, url: str) -> str:
    """A formula on a line of its own, with its number and links to the functions that it names.

    Args:
        latex: With the comments that name functions.
        number: Counted from 1 on each page.
        url: Of the page.
    """
    formula, references = split_references(latex)
    links = ", ".join(link_reference(*reference, url) for reference in references)
    below = f'<div class="computed-by">{links}</div>' if links else ""
    return (
        f'<div class="equation" id="eq-{number}">'
        f'<div class="formula">{draw_formula(formula, "block")}</div>'
        f'<a class="number" href="#eq-{number}">({number})</a>{below}</div>'
    )


def draw_formula(latex: str, display: str) -> str:
    """A formula as MathML.

    Args:
        latex: What latex2mathml understands; `align*` for several lines.
        display: "inline" or "block".

    Raises:
        PluginError: For a command that it does not understand.
    """
    formula = convert(latex, display=display).replace(r"\_", "_")
    unknown = UNKNOWN.findall(formula)
    if unknown:
        raise PluginError(f"the formula {latex!r} has {unknown}, which latex2mathml does not know")
    tree = ElementTree.fromstring(formula)
    for row in tree.iter():
        space_signs(list(row))
    return ElementTree.tostring(tree, encoding="unicode")


def space_signs(pieces: list[ElementTree.Element]) -> None:
    """The spaces around bars, signs and functions, which browsers know only where a formula is nested.

    Bars are close to what they enclose, a sign belongs to the number behind it, and a function to its bracket.

    Args:
        pieces: What stands beside one another.
    """
    for before, piece, after in zip([None, *pieces], pieces, [*pieces[1:], None], strict=False):
        sign = find_sign(piece)
        if sign is None:
            continue
        last = None if before is None else find_sign(before)
        leads = before is None or (last is not None and last.text not in tuple(")]}|‖"))
        if sign.text in tuple("|‖"):
            sign.set("lspace", "0")
            sign.set("rspace", "0")
        elif sign.text in tuple("−+±") and leads and piece is sign:
            sign.set("form", "prefix")
        elif (sign.text or "").isalpha() and len(sign.text or "") > 1:
            if leads:
                sign.set("lspace", "0")
            if after is not None and after.text in tuple("(["):
                sign.set("rspace", "0")


def find_sign(piece: ElementTree.Element) -> ElementTree.Element | None:
    """The sign or the function that a piece is, with or without indices; None for other pieces.

    Args:
        piece: Of a formula.
    """
    while re.search(r"}m(sub|sup|subsup|under|over|underover)$", piece.tag) and len(piece):
        piece = piece[0]
    return piece if piece.tag.endswith("}mo") else None


def allow_breaks(formula: str) -> str:
    """A long formula in a line of text as several, between which the line may end: browsers break no formula.

    It may end after a relation, a sum's sign or a comma, outside of brackets or within one pair of them.

    Args:
        formula: MathML.
    """
    tree = ElementTree.fromstring(formula)
    row = tree.find("{*}mrow")
    if row is None or len("".join(tree.itertext())) <= WHOLE:
        return formula
    parts: list[list[ElementTree.Element]] = [[]]
    depth = 0
    for piece in row:
        sign = (piece.text or "") if piece.tag.endswith("}mo") else ""
        depth += (sign in tuple("([{")) - (sign in tuple(")]}"))
        parts[-1].append(piece)
        if sign in ENDS and depth <= 1 and len(parts[-1]) > 1:
            piece.set("form", "infix")  # the last of its part, it would lose the space behind it
            parts.append([])
    return "<wbr>".join(join_row(part) for part in parts if part)


def join_row(pieces: list[ElementTree.Element]) -> str:
    """A formula of its own.

    Args:
        pieces: Elements of MathML.
    """
    math = ElementTree.Element("math", {"xmlns": "http://www.w3.org/1998/Math/MathML", "display": "inline"})
    row = ElementTree.SubElement(math, "mrow")
    for piece in pieces:
        for element in piece.iter():
            element.tag = element.tag.rpartition("}")[2]  # ElementTree writes a namespace before every name
        row.append(piece)
    return ElementTree.tostring(math, encoding="unicode")


def split_references(latex: str) -> tuple[str, list[tuple[str, str]]]:
    """(formula without comments, (file, name) of every function that its comments name).

    Args:
        latex: A displayed formula.

    Raises:
        PluginError: For a comment of another form.
    """
    lines = latex.splitlines()
    return "\n".join(line for line in lines if not line.startswith("%")), list(read_references(lines))


def read_references(lines: list[str]) -> Iterator[tuple[str, str]]:
    """(file, name) from each line that is a comment.

    Args:
        lines: Of a displayed formula.

    Raises:
        PluginError: For a comment of another form.
    """
    for line in lines:
        if line.startswith("%"):
            found = REFERENCE.fullmatch(line[1:].strip())
            if found is None or found[2] is None:
                raise PluginError(f"{line!r} beside a formula, expected '% natgrad/folder/file.py: name'")
            yield found[1], found[2]


def link_reference(file: str, dotted: str, url: str) -> str:
    """The function's name with a link to its explanation, and its line with a link to the source.

    Args:
        file: From the repository's root.
        dotted: Its name in the file.
        url: Of the page.

    Raises:
        PluginError: If the file has no such name.
    """
    line = find_line(file, dotted)
    if line is None:
        raise PluginError(f"a formula names {file}: {dotted}, and there is no such name")
    anchor = find_anchor_in(file, dotted)
    name = f"<code>{dotted}</code>"
    if anchor:
        name = f'<a href="{get_relative_url(anchor, url)}">{name}</a>'
    return f'{name} · <a href="{get_relative_url(source_url(file, line), url)}">line {line}</a>'
