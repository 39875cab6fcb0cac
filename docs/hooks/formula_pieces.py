r"""Formulas in running text, as a docstring has them: `(G + damping I)^-1 g`.

A formula is a run of pieces that are mathematics: letters, Greek names, numbers, functions, operators, brackets. A word
is one of them only beside an operator. What is not understood stays text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

GREEK = set(
    re.findall(
        r"\w+",
        "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau phi chi psi omega "
        "Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega",
    )
)
KNOWN = {"log", "exp", "det", "min", "max", "sin", "cos", "tan", "tanh", "arcsin", "ln"}
NAMED = {
    "tr",
    "diag",
    "KL",
    "Cov",
    "Var",
    "sigmoid",
    "rank",
    "erf",
    "sign",
    "polar",
    "span",
    "Re",
    "Im",
    "trace",
    "median",
}
FUNCTIONS = KNOWN | NAMED | {"sqrt", "sum", "prod", "E", "grad", "Hess"}
VARIABLES = {"lam", "lr", "eps", "std", "rhs"}  # arguments that formulas name beside letters
DIFFERENTIALS = {f"d{name}" for name in (*"bcfgijkpqrstuvwxyzBEFGLMPRSTVWX", *GREEK)}
RELATIONS = {"=": "=", "<-": r"\leftarrow", "<=": r"\le", ">=": r"\ge", "<": "<", ">": ">", "~": r"\sim", "!=": r"\ne",
             "->": r"\to", "<<": r"\ll", ">>": r"\gg", "||": r"\|"}  # fmt: skip
BINARY = {"+": "+", "-": "-", "*": r"\cdot", "/": "/", "(x)": r"\otimes", "o": r"\circ", ".": r"\cdot"}
OPENS, CLOSES = {"(": ")", "[": "]", "{": "}"}, {")", "]", "}"}
NAME = r"(?:[A-Za-z]\d(?!\w)|[A-Za-z]+)'?"
PIECE = re.compile(
    r"(?P<number>\d*\.\d+(?:e-?\d+)?|\d+(?:e-?\d+)?)"
    rf"|(?P<name>{NAME}(?:_(?:\{{[^}}]*\}}|[A-Za-z0-9]+(?:[+-]1)?)'?)?)"
    r"|(?P<dots>\.\.\.)|(?P<relation><-|->|<=|>=|<<|>>|!=|\|\||[=<>~])|(?P<binary>[-+*/])"
    r"|(?P<power>\^)|(?P<bar>\|)|(?P<open>[(\[{])|(?P<close>[)\]}])|(?P<mark>[,;])|(?P<dot>\.)"
)
SHAPE = re.compile(r"\((?:[\w. +*/-]+, ?)+(?:[\w. +*/-]+)?\)")


@dataclass(frozen=True)
class Piece:
    """A part of a text.

    Args:
        kind: A group's name in `PIECE`, or "word" for what is no mathematics by itself.
        text: As it is written.
        start: Its place in the text.
        spaced: True if there is a space before it.
        ends: True if there is a space, or nothing, behind it.
    """

    kind: str
    text: str
    start: int
    spaced: bool
    ends: bool

    @property
    def end(self) -> int:
        """The place behind it."""
        return self.start + len(self.text)

    @property
    def alone(self) -> bool:
        """True if spaces are on both sides."""
        return self.spaced and self.ends

    @property
    def is_operator(self) -> bool:
        """True if it joins what stands on its two sides."""
        return self.kind in ("relation", "binary", "times")

    @property
    def is_mathematics(self) -> bool:
        """True for what may stand in a formula by itself."""
        return self.kind not in ("word", "stop")


def find_formulas(text: str) -> list[list[Piece]]:
    """The runs of pieces that are formulas of more than one symbol.

    Args:
        text: Without code.
    """
    pieces, found, i = read_pieces(text), [], 0
    while i < len(pieces):
        j = end_of_run(pieces, i)
        run = trim_run(pieces[i:j], pieces[j] if j < len(pieces) else None)
        if run and run[0].kind == "open" and not balances(run):
            j = i + 1  # a bracket of the sentence
        elif run and is_formula(run) and is_whole(run, pieces):
            found.append(run)
        i = max(j, i + 1)
    return found


def is_whole(run: list[Piece], pieces: list[Piece]) -> bool:
    """True unless it is a part of a longer formula, of which some was not understood.

    Args:
        run: Pieces that are all mathematics.
        pieces: All.
    """
    first, last = pieces.index(run[0]), pieces.index(run[-1])
    before = pieces[first - 1] if first else None
    after = pieces[last + 1] if last + 1 < len(pieces) else None
    return not (is_torn(before) or is_torn(after) or (before is not None and before.kind == "close"))


def is_torn(piece: Piece | None) -> bool:
    """True for an operator that has lost its other side, or a chunk with signs that is no word.

    Args:
        piece: What stands beside a run.
    """
    if piece is None or piece.kind == "stop":
        return False
    if piece.kind == "word":
        return not piece.ends or re.search(r"[\[\](){}^|=+*/<>_²³⁴√]", piece.text.strip("()")) is not None
    return piece.is_operator or piece.kind in ("power", "bar")


def read_pieces(text: str) -> list[Piece]:
    """The text in pieces; chunks between spaces that are not all mathematics are words.

    Args:
        text: Without code.
    """
    pieces: list[Piece] = []
    shapes = {m.start(): m for m in SHAPE.finditer(text)}
    skip = 0
    for chunk in re.finditer(r"(?:_\{[^}]*\}|\S)+", text):
        if chunk.start() < skip:
            continue
        shape = shapes.get(chunk.start())
        joined = bool(pieces) and (pieces[-1].is_operator or pieces[-1].kind in ("open", "mark"))
        if shape and not joined and "^" not in shape[0] and "_" not in shape[0]:
            pieces.append(Piece("stop", shape[0], shape.start(), True, True))
            skip = shape.end()
            rest = re.match(r"\S*", text[skip:])
            skip += len(rest[0]) if rest else 0
            continue
        pieces += read_chunk(chunk[0], chunk.start())
    return [mark_word(pieces, i) for i in range(len(pieces))]


def read_chunk(chunk: str, start: int) -> list[Piece]:
    """The pieces of what stands between two spaces.

    Args:
        chunk: Without spaces.
        start: Its place in the text.
    """
    if chunk in ("(x)", "o") or (chunk == "." and start):
        return [Piece("times", chunk, start, True, True)]
    body = chunk.rstrip(".,;:") if not chunk.endswith("...") else chunk
    tail = chunk[len(body) :]
    pieces, at = [], 0
    while at < len(body):
        match = PIECE.match(body, at)
        if match is None or match.lastgroup is None:
            return [Piece("word", chunk, start, True, True)]
        pieces.append(Piece(match.lastgroup, match[0], start + at, at == 0, match.end() == len(body)))
        at = match.end()
    if looks_like_code(body, pieces):
        return [Piece("word", chunk, start, True, True)]
    if tail:
        kind = "mark" if tail in (",", ";") else "stop"
        pieces.append(Piece(kind, tail, start + len(body), False, True))
    return pieces


def looks_like_code(chunk: str, pieces: list[Piece]) -> bool:
    """True for `lr=0.1`, `K-FAC`, `natural(eta)`, `sample_size`, `and/or`: no mathematics.

    Args:
        chunk: Without spaces.
        pieces: It in pieces.
    """
    if any(p.kind == "dot" for p in pieces) or "->" in chunk[1:-2]:
        return True
    if re.search(r"[A-Za-z]=|=[A-Za-z0-9]", chunk):
        return True
    for left, middle, right in zip(pieces, pieces[1:], pieces[2:], strict=False):
        between_names = middle.text in "-/" and left.kind == right.kind == "name"
        if between_names and (middle.text == "-" or not (is_symbol(left.text) and is_symbol(right.text))):
            return True
    if any(p.kind == "relation" and p.text in "<>" and len(pieces) > 1 and (p.spaced or p.ends) for p in pieces):
        return True
    if any(left.kind == right.kind == "name" for left, right in pairwise(pieces)):
        return True
    return any(p.kind == "name" and "_" in p.text and not is_indexed(p.text) for p in pieces)


def is_indexed(name: str) -> bool:
    """True for `x_i`, `I_theta`, `sum_{i < j}`: a symbol with a short index.

    Args:
        name: With an underscore.
    """
    stem, _, index = name.rstrip("'").partition("_")
    if stem in FUNCTIONS - {"log"}:
        return True
    if is_symbol(stem):
        return index.startswith("{") or index in GREEK or len(re.sub(r"[+-]1$", "", index)) <= 5
    return index in tuple("ijkl") and stem.isalpha()


def is_symbol(name: str) -> bool:
    """True for one letter, a Greek name, or one of them with an index.

    Args:
        name: Letters, perhaps with a prime and an index.
    """
    stem = name.partition("_")[0].rstrip("'")
    if stem in VARIABLES:
        return True
    indexed = "_" in name and stem not in FUNCTIONS
    return len(stem) == 1 or stem[1:].isdigit() or stem in GREEK or stem in DIFFERENTIALS or indexed


def mark_word(pieces: list[Piece], i: int) -> Piece:
    """The piece; a name of several letters is mathematics only as a function or beside an operator.

    Args:
        pieces: All.
        i: Which.
    """
    piece = pieces[i]
    if piece.kind != "name" or is_symbol(piece.text):
        return piece
    before, after = pieces[i - 1] if i else None, pieces[i + 1] if i + 1 < len(pieces) else None
    stem = piece.text.partition("_")[0]
    argument = after is not None and is_argument(after)
    if stem in FUNCTIONS and ("_" in piece.text or (argument and stem not in ("sum", "prod"))):
        return piece
    if before is not None and before.kind == "open" and after is not None and is_symbol(after.text):
        return piece  # (rate d)^2
    powered = after is not None and after.kind == "power" and not after.spaced
    exponent = before is not None and before.kind == "power"
    if powered or exponent or stands_beside_operator(before, after):
        return piece
    return Piece("word", piece.text, piece.start, piece.spaced, piece.ends)


def is_argument(after: Piece) -> bool:
    """True if a function's argument may begin so.

    Args:
        after: What follows the function's name.
    """
    if after.kind == "open":
        return not after.spaced
    return after.kind in ("number", "bar") or (
        after.kind == "name" and (is_symbol(after.text) or after.text in FUNCTIONS)
    )


def stands_beside_operator(before: Piece | None, after: Piece | None) -> bool:
    """True for the word in `1 / rate`, `decay * v`, `(rate d)`.

    Args:
        before: The piece before it.
        after: The piece behind it.
    """
    if any(piece is not None and piece.text == "->" for piece in (before, after)):
        return False
    if before is not None and before.is_operator:
        return True
    joined = before is not None and before.kind in ("name", "close") and is_symbol(before.text)
    return after is not None and after.is_operator and after.ends and not joined


def end_of_run(pieces: list[Piece], i: int) -> int:
    """One behind the last piece of the run of mathematics that begins at i.

    Args:
        pieces: All.
        i: The first.
    """
    depth = 0
    while i < len(pieces) and pieces[i].is_mathematics:
        depth += (pieces[i].kind == "open") - (pieces[i].kind == "close")
        if depth < 0 or (pieces[i].kind == "mark" and depth == 0):
            break
        i += 1
    return i


def trim_run(run: list[Piece], after: Piece | None) -> list[Piece]:
    """The run without operators, marks and articles at its ends.

    Args:
        run: Pieces that are all mathematics.
        after: What follows.
    """
    while run and (run[-1].is_operator or run[-1].kind in ("mark", "open") or run[-1].text == "..."):
        if run[-1].text == "*" and not run[-1].spaced:
            break
        run = run[:-1]
    if (
        run
        and run[-1].text == "a"
        and after is not None
        and after.kind == "word"
        and len(run) > 1
        and not run[-2].is_operator
    ):
        run = run[:-1]
    while run and (run[0].kind in ("relation", "mark", "close") or run[0].text in ("+", "*", "/", "(x)", "^")):
        run = run[1:]
    if len(run) > 1 and run[0].text in ("a", "A") and run[1].spaced and not run[1].is_operator and run[1].kind != "bar":
        run = run[1:]
    return run


def is_formula(run: list[Piece]) -> bool:
    """True for more than one symbol, joined by something that prose has not.

    Args:
        run: Pieces that are all mathematics.
    """
    letters = [p for p in run if p.kind == "name"]
    if len(run) == 1 and "_" in run[0].text and run[0].text.partition("_")[0] not in FUNCTIONS:
        return True
    if run[-1].text in FUNCTIONS and run[-1].text != "E":
        return False
    operands = [p for p in run if p.kind in ("name", "number")]
    if not letters or len(operands) < 2 or not balances(run):
        return False
    if not any(is_symbol(p.text) or p.text.partition("_")[0] in FUNCTIONS for p in letters):
        return False
    return any(p.kind in ("power", "relation", "binary", "times") or "_" in p.text or p.text in FUNCTIONS for p in run)


def balances(run: list[Piece]) -> bool:
    """True if every bracket closes, and bars come in pairs.

    Args:
        run: Pieces.
    """
    waiting = []
    for piece in run:
        if piece.kind == "open":
            waiting.append(OPENS[piece.text])
        elif piece.kind == "close" and (not waiting or waiting.pop() != piece.text):
            return False
    bars = [p for p in run if p.kind == "bar" and not p.alone]
    return not waiting and len(bars) % 2 == 0
