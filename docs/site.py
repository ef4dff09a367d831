"""What `mkdocs build` does beside mkdocs.yml: pages read alike on GitHub and on the site."""

from __future__ import annotations

import posixpath
import re
from typing import Any

from pymdownx import slugs

#: A link, or a picture, to a path.
_LINK = re.compile(r"(\]\()(?![a-z]+:|#)([^)\s]+)(\))")


def on_config(config: Any) -> Any:
    """Give headings the anchors that GitHub gives them."""
    config["mdx_configs"].setdefault("toc", {})["slugify"] = slugs.slugify(case="lower")
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let links that leave docs/ lead to the repository."""
    here = posixpath.dirname(page.file.src_uri)

    def lead(found: re.Match[str]) -> str:
        path, mark, anchor = found[2].partition("#")
        target = posixpath.normpath(posixpath.join(here, path))
        if not target.startswith("../"):
            return found[0]
        return f"{found[1]}{config['repo_url']}/blob/main/{target[3:]}{mark}{anchor}{found[3]}"

    return _LINK.sub(lead, markdown)
