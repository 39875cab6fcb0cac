"""For mkdocstrings: `Example:` is shown as code, options by name are shown one by one, formulas are typeset."""

from __future__ import annotations

import inspect
import pydoc
import re
import sys
from pathlib import Path
from typing import Any

import griffe

from natgrad.optim.options import join_arguments, list_texts

sys.path.append(str(Path(__file__).parent))  # Griffe loads this file by its path
from docstring_formulas import typeset_docstring


class ReadableDocstrings(griffe.Extension):
    """Reads `Example:` as code to show, not as a paragraph, and `**options` as what a user types in its place."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Renames the section before the docstring is parsed.

        Args:
            obj: A module, class or function.
            **kwargs: What else Griffe passes.
        """
        if obj.docstring:
            obj.docstring.value = rename_section(obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **kwargs: object) -> None:
        """Lists the options, once all is read.

        Args:
            pkg: The package.
            **kwargs: What else Griffe passes.
        """
        list_options(pkg)
        typeset_formulas(pkg)


def rename_section(text: str) -> str:
    """The docstring with the section name that Griffe knows.

    Args:
        text: A docstring.
    """
    return re.sub(r"^Example:$", "Examples:", text, flags=re.M)


def typeset_formulas(parent: griffe.Object) -> None:
    """In all docstrings below: formulas between dollars, which become MathML.

    Args:
        parent: A module or class.
    """
    if parent.docstring:
        parent.docstring.value = typeset_docstring(parent.docstring.value)
    for child in parent.members.values():
        if isinstance(child, griffe.Object):
            typeset_formulas(child)


def list_options(parent: griffe.Object) -> None:
    """In all functions below: the keywords that stand for `**options: Unpack[...]`.

    Args:
        parent: A module or class.
    """
    for child in list(parent.members.values()):
        if isinstance(child, griffe.Function) and len(child.parameters):
            match = re.fullmatch(r"(?:\w+\.)*Unpack\[(\w+)\]", str(child.parameters[-1].annotation))
            if match:
                replace_options(child, match[1])
        elif isinstance(child, griffe.Module | griffe.Class):
            list_options(child)


def replace_options(function: griffe.Function, options: str) -> None:
    """Put the keywords of a TypedDict into a signature and its docstring.

    Args:
        function: What takes them as its last parameter.
        options: The TypedDict's name, in the function's module.
    """
    found: Any = pydoc.locate(function.path)
    table = vars(sys.modules[inspect.unwrap(found).__module__])[options]
    known = inspect.signature(found).parameters
    last, named = function.parameters[-1], {p.name for p in function.parameters}
    parameters = [p for p in function.parameters if p is not last]
    for name, note in table.__annotations__.items():
        if name not in named and (name in known or last.name in known):
            default = repr(known[name].default) if name in known else "..."
            kind = griffe.ParameterKind.keyword_only
            note = getattr(note, "__forward_arg__", note)
            parameters.append(griffe.Parameter(name, annotation=str(note), kind=kind, default=default))
    function.parameters = griffe.Parameters(*parameters)
    owner, notes = function.parent if function.name == "__init__" else function, inspect.getdoc(table) or ""
    if owner and owner.docstring and "\nArgs:\n" in notes:
        names = [p.name for p in parameters if p.name not in named]
        owner.docstring.value = join_arguments(owner.docstring.value, list_texts(table), names)
