r"""LaTeX for a formula that was found in a docstring: `sqrt(2 r / d^T G d)` becomes `\sqrt{2 r / d^T G d}`."""

from __future__ import annotations

import re
from collections.abc import Callable

from formula_pieces import BINARY, DIFFERENTIALS, GREEK, KNOWN, NAMED, RELATIONS, Piece

BRACKETS = {"{": r"\{", "}": r"\}"}


def write_latex(run: list[Piece]) -> str:
    """The formula as LaTeX.

    Args:
        run: Its pieces; their brackets balance.
    """
    parts, i = [], 0
    while i < len(run):
        text, after = write_piece(run, i)
        if i and needs_space(run[i - 1], run[i]):
            parts.append(r"\,")
        parts.append(text)
        i = after
    return " ".join(parts)


def needs_space(left: Piece, right: Piece) -> bool:
    """True between factors of which one is a word: `damping I`.

    Args:
        left: A piece.
        right: The next.
    """
    ends = left.kind in ("name", "number") or left.text == ")"
    begins = right.kind in ("name", "number")
    return ends and begins and (is_word(left.text) or is_word(right.text))


def is_word(text: str) -> bool:
    """True for a name of several letters that is not Greek: `damping`, `log`.

    Args:
        text: A name.
    """
    stem = text.partition("_")[0].rstrip("'")
    return len(stem) > 1 and stem.isalpha() and (stem in KNOWN or r"\mathrm" in write_stem(stem))


def write_piece(run: list[Piece], i: int) -> tuple[str, int]:
    """(LaTeX, one behind what it stands for) of the piece at i.

    Args:
        run: Pieces.
        i: Which.
    """
    piece = run[i]
    if piece.kind == "power":
        return write_power(run, i)
    if piece.text.partition("_")[0] == "sqrt":
        return write_root(run, i)
    if piece.text == "*" and not piece.spaced:
        return r"^{*}", i + 1
    return WRITERS.get(piece.kind, str)(piece.text if piece.kind != "bar" or not piece.alone else " | "), i + 1


def write_power(run: list[Piece], i: int) -> tuple[str, int]:
    """(LaTeX, one behind it) of an exponent: `^T`, `^-1`, `^-1/2`, `^(t - s)`.

    Args:
        run: Pieces.
        i: Of the `^`.
    """
    j = i + 1
    if j < len(run) and run[j].text in ("-", "+"):
        j += 1
    if j < len(run) and run[j].kind == "open":
        end = find_close(run, j)
        inner = run[j + 1 : end]
        return "^{" + "".join(p.text for p in run[i + 1 : j]) + write_latex(inner) + "}", end + 1
    if j < len(run) and run[j].kind in ("name", "number") and not run[j].spaced:
        j += 1
        if j + 1 < len(run) and run[j].text == "/" and run[j + 1].kind == "number" and not run[j].spaced:
            j += 2
    return "^{" + write_latex(run[i + 1 : j]) + "}", j


def write_root(run: list[Piece], i: int) -> tuple[str, int]:
    """(LaTeX, one behind it) of a square root: `sqrt(a + b)`, `sqrt 2`, `sqrt w_j`.

    Args:
        run: Pieces.
        i: Of the `sqrt`.
    """
    if i + 1 < len(run) and run[i + 1].kind == "open":
        end = find_close(run, i + 1)
        return r"\sqrt{" + write_latex(run[i + 2 : end]) + "}", end + 1
    return r"\sqrt{" + write_latex(run[i + 1 : i + 2]) + "}", i + 2


def find_close(run: list[Piece], i: int) -> int:
    """The place of the bracket that closes the one at i.

    Args:
        run: Pieces whose brackets balance.
        i: Of an opening bracket.
    """
    depth = 0
    for j in range(i, len(run)):
        depth += (run[j].kind == "open") - (run[j].kind == "close")
        if depth == 0:
            return j
    return len(run)


def write_symbol(name: str) -> str:
    """A name as LaTeX: one letter, Greek, a function, or a word in upright letters; with its index.

    Args:
        name: Letters, perhaps with a prime and an index.
    """
    stem, _, index = name.rstrip("'").partition("_")
    base, primes = stem.rstrip("'"), "'" * name.count("'")
    if index:
        index = re.sub(r"~|<=|>=|\bin\b", lambda m: RELATIONS.get(m[0], r"\in"), index)
        inner = re.sub(r"[A-Za-z]{3,}", lambda m: write_index(m[0]), index.strip("{}"))
        index = f"_{{{inner}}}"
    return write_stem(base) + primes + index


def write_index(index: str) -> str:
    """Letters of an index: Greek, a word in upright letters such as `max`, or several indices such as `jtx`.

    Args:
        index: Three letters or more.
    """
    if index == "sim" or not (index in GREEK or re.search("[aeou]|min", index)):
        return index
    return write_stem(index)


def write_stem(stem: str) -> str:
    """A name without its index.

    Args:
        stem: Letters.
    """
    if stem in GREEK or stem in KNOWN:
        return "\\" + stem
    if stem in ("sum", "prod"):
        return "\\" + stem
    if stem == "grad":
        return r"\nabla"
    if stem[1:].isdigit():
        return f"{stem[0]}_{{{stem[1:]}}}"
    if stem in DIFFERENTIALS:
        return "d " + write_stem(stem[1:])
    if stem in NAMED or stem in ("E", "Hess") or len(stem) > 1:
        return rf"\mathrm{{{stem}}}"
    return stem


def write_number(number: str) -> str:
    """A number; `2e-3` as a product with a power of ten.

    Args:
        number: As it is written.
    """
    digits, _, power = number.partition("e")
    if not power:
        return number
    return f"10^{{{power}}}" if digits == "1" else rf"{digits} \cdot 10^{{{power}}}"


WRITERS: dict[str, Callable[[str], str]] = {
    "name": write_symbol,
    "number": write_number,
    "relation": RELATIONS.__getitem__,
    "binary": BINARY.__getitem__,
    "times": BINARY.__getitem__,
    "dots": lambda _: r"\ldots",
    "mark": lambda text: text + r"\;",
    "open": lambda text: BRACKETS.get(text, text),
    "close": lambda text: BRACKETS.get(text, text),
}
