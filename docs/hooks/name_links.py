"""For mkdocs: names in code become links to the API or to a line of the source, and the source files become pages."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url
from names import REFERENCE, ROOT, find_anchor, find_line
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from source_pages import WANTED, source_url

SPAN = re.compile(r"<(a|pre|h[1-6]|svg|script)\b.*?</\1>|<code>([^<]*)</code>", re.S)
"""A piece of code in running text; what stands in links, headings and blocks is passed over."""


def on_page_content(content: str, page: Page, **_: Any) -> str:
    """The page with links on the names that it mentions.

    Args:
        content: HTML.
        page: Whose content it is.
        **_: What else mkdocs passes.
    """
    return SPAN.sub(lambda found: link_code(found, page.url), content)


def link_code(found: re.Match[str], url: str) -> str:
    """One match of `SPAN`, with a link where its text is known.

    Args:
        found: The match.
        url: Of the page.
    """
    text = html.unescape(found[2] or "")
    reference = REFERENCE.fullmatch(text)
    if reference and (ROOT / reference[1]).is_file():
        line = find_line(reference[1], reference[2]) if reference[2] else None
        target: str | None = source_url(reference[1], line)
    else:
        target = find_anchor(text)
    if target is None or target.partition("#")[0] == url:
        return found[0]
    return f'<a class="name" href="{get_relative_url(target, url)}">{found[0]}</a>'


def on_post_build(config: MkDocsConfig) -> None:
    """Writes the source files that were linked to.

    Args:
        config: Of mkdocs.
    """
    for file in sorted(WANTED):
        target = Path(config.site_dir) / source_url(file, None)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(show_source(file), encoding="utf-8")


def show_source(file: str) -> str:
    """A source file as a page of its own, with an anchor per line, `L-12`.

    Args:
        file: From the repository's root.
    """
    formatter = HtmlFormatter(linenos="inline", lineanchors="L", anchorlinenos=True, cssclass="source")
    body = highlight((ROOT / file).read_text(encoding="utf-8"), PythonLexer(), formatter)
    light = formatter.get_style_defs(".source")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".source")
    return PAGE.format(file=file, up="../" * (file.count("/") + 1), light=light, dark=dark, body=body)


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{file}</title>
<style>
body {{ margin: 0; font: 14px/1.45 system-ui, sans-serif; color-scheme: light dark; }}
header {{ padding: .7rem 1rem; border-bottom: 1px solid #8886; overflow-wrap: anywhere; }}
pre {{ margin: 0; padding: 1rem; overflow-x: auto; }}
.source a {{ color: inherit; text-decoration: none; }}
.source .linenos {{ user-select: none; opacity: .5; padding-right: 1em; }}
:target {{ scroll-margin-top: 4rem; }}
a[id^="L-"]:target + a, a[id^="L-"]:target {{ background: #fa04; }}
{light}
@media (prefers-color-scheme: dark) {{ body {{ background: #0d1117; }} {dark} }}
</style>
</head>
<body>
<header><a href="{up}index.html">natgrad</a> &middot; <code>{file}</code></header>
{body}
</body>
</html>
"""
