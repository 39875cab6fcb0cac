"""A choice written as text: `"cross_entropy"`, `"trust_region(0.01)"`, as configuration files have them."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

Names = Mapping[str, Callable[..., Any]]


def read_choice(argument: str, text: str, names: Names, parts: Names | None = None) -> Any:
    """The object that a text stands for: a name, or a name with its arguments in parentheses.

    A class's own name is a name too, so that the text may be what an object prints as. Arguments are numbers, words in
    quotes, True, False, None, inf, and other choices: of these names, or of the parts.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        tree = None
    if not isinstance(tree, (ast.Name, ast.Call)):
        raise ValueError(describe_unknown_name(argument, text, names))
    build, args, options = read_call(argument, tree, names)
    inner = {**(parts or {}), **names}
    try:
        return build(
            *(read_argument(argument, arg, inner) for arg in args),
            **{str(option.arg): read_argument(argument, option.value, inner) for option in options},
        )
    except TypeError as error:
        raise TypeError(f"{argument} is {text!r}: {error}") from None


def read_call(
    argument: str, tree: ast.Name | ast.Call, names: Names
) -> tuple[Callable[..., Any], list[ast.expr], list[ast.keyword]]:
    """What a name builds, and the arguments that stand behind it."""
    name = ast.unparse(tree.func if isinstance(tree, ast.Call) else tree)
    own = {strip_name(build.__name__): build for build in names.values()}
    build = (own | {strip_name(key): build for key, build in names.items()}).get(strip_name(name))
    if build is None:
        raise ValueError(describe_unknown_name(argument, name, names))
    return (build, tree.args, tree.keywords) if isinstance(tree, ast.Call) else (build, [], [])


def read_argument(argument: str, tree: ast.expr, names: Names) -> Any:
    """The value of an argument; nothing of the text is run."""
    if isinstance(tree, ast.Name) and tree.id == "inf":
        return math.inf
    if isinstance(tree, (ast.Name, ast.Call)):
        return read_choice(argument, ast.unparse(tree), names)
    try:
        return ast.literal_eval(tree)
    except ValueError:
        part = ast.unparse(tree)
        raise ValueError(f"{argument} has {part!r} in it, expected numbers, words in quotes, True, None") from None


def strip_name(name: str) -> str:
    """In small letters, without underscores and without the word loss: `MSELoss`, `mse_loss` and `mse` are one."""
    return name.lower().replace("_", "").removesuffix("loss")


def describe_unknown_name(argument: str, text: str, names: Names) -> str:
    """What is wrong with a name that is not known, with all that are."""
    near = get_close_matches(text.lower(), names, 1)
    listed = ", ".join(map(repr, names))
    return f"{argument} is {text!r}, expected one of {listed}" + (f"; did you mean {near[0]!r}?" if near else "")
