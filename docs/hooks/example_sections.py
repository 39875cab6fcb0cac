"""For mkdocstrings: a docstring's `Example:` is the section that Griffe knows as `Examples:`."""

from __future__ import annotations

import re

import griffe


class ExampleSections(griffe.Extension):
    """Reads `Example:` as code to show, not as a paragraph."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Renames the section before the docstring is parsed.

        Args:
            obj: A module, class or function.
            **kwargs: What else Griffe passes.
        """
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)
