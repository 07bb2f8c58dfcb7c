"""What `make site` does to pages that GitHub does by itself; mkdocs.yml names this file.

README.md is the first page, pages of studies are found, and notebooks become pages with what they print and draw. Links
to files that are not on the site, such as code, become their paths. Lists and tables may follow a line of text, and
"[a] [b]" is no link, as on GitHub.
"""

from __future__ import annotations

import base64
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # neither the tests of this file nor anything else needs MkDocs
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
INDEX = "index.md"
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"```.*?^\s*```", re.DOTALL | re.MULTILINE)
LIST_AFTER_TEXT = re.compile(r"^([^\s|#>*+-][^\n]*)\n(?=(?:[-*+]|1\.) )", re.MULTILINE)
CODE_OR_BRACKETS = re.compile(r"`[^`]*`|\](?= ?\[)")
TABLE_AFTER_COMMENT = re.compile(r"(-->)\n(?=\|)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the pages of single studies after the page on running them."""
    studies = next(section["Studies"] for section in config.nav or [] if "Studies" in section)
    studies += sorted(f"studies/{path.name}" for path in Path(config.docs_dir, "studies").glob("*.md"))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, INDEX, content=readme))
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(notebook)
        page = Path(notebook.src_uri).with_suffix(".md")
        text, images = notebook_page(json.loads(notebook.content_string), page.stem)
        files.append(File.generated(config, page.as_posix(), content=text))
        for name, image in images.items():
            files.append(File.generated(config, page.with_name(name).as_posix(), content=image))
    return files


def notebook_page(notebook: dict[str, Any], name: str) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its images by the names that the Markdown has for them."""
    blocks: list[str] = []
    images: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            blocks.append(source)
            continue
        language = "sh" if source.startswith("%%sh") else "python"
        blocks.append(f"```{language}\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                file = f"{name}-{len(images) + 1}.png"
                images[file] = base64.b64decode(data["image/png"])
                blocks.append(f"![What the code above draws]({file})")
            elif text := "".join(output.get("text", data.get("text/plain", ""))).strip("\n"):
                blocks.append(f"``` {{.text .printed}}\n{text}\n```")
    return "\n\n".join(blocks) + "\n", images


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A page with its links as the site has them; code blocks stay as they are."""
    uri = page.file.src_uri
    source = ROOT / "README.md" if uri == INDEX else Path(config.docs_dir, uri)
    known = {file.src_uri for file in files}

    def change(text: str) -> str:
        text = LIST_AFTER_TEXT.sub(r"\1\n\n", TABLE_AFTER_COMMENT.sub(r"\1\n\n", text))
        text = CODE_OR_BRACKETS.sub(lambda found: found[0].replace("]", "\\]") if found[0] == "]" else found[0], text)
        return LINK.sub(lambda link: change_link(link, source, uri, known), text)

    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [change(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(markdown[end:])])


def change_link(link: re.Match[str], source: Path, uri: str, known: set[str]) -> str:
    """A link on the page made of `source`; one that leads nowhere stays, so that MkDocs complains."""
    image, words, target, anchor = link.groups(default="")
    path = Path(os.path.normpath(source.parent / target))
    if "://" in target or target.startswith("mailto:") or not path.exists():
        return link[0]
    name = path.relative_to(ROOT).as_posix()
    on_site = INDEX if name == "README.md" else re.sub(r"\.ipynb$", ".md", name.removeprefix("docs/"))
    if on_site in known:
        return f"{image}[{words}]({os.path.relpath(on_site, os.path.dirname(uri) or '.')}{anchor})"
    return f"`{name}`" if Path(name).name in words else f"{words} (`{name}`)"
