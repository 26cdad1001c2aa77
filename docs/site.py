"""What the site has beside the guides: README as its first page, the files that guides link to, and the reference.

mkdocs.yml names this file, and mkdocs calls its functions by their names.
"""

import ast
import re
from pathlib import Path

import griffe
from mkdocs.structure.files import File

_ROOT = Path(__file__).parents[1]


class Examples(griffe.Extension):
    """Shows what stands below "Example:" as code."""

    def on_object(self, *, obj, **kwargs):
        """Called for each object with its docstring, before that is read."""
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")


def on_config(config):
    """Adds the reference of each public package to the navigation."""
    config.nav += [{"Reference": [f"reference/{name}.md" for name in _packages()]}, {"Changes": "CHANGELOG.md"}]


def on_files(files, config):
    """Adds pages and files from outside docs/, and pages that list what there is."""
    guides = "".join(page.content_string for page in files.documentation_pages())
    for path in {*re.findall(r"\]\(\.\./([^)#]+)", guides), *_examples()}:
        files.append(File.generated(config, path, abs_src_path=str(_ROOT / path)))
    pages = {"index.md": _of_root("README.md").replace("](examples)", "](examples.md)")}
    pages |= {name: _of_root(name) for name in ("CHANGELOG.md", "CONTRIBUTING.md")}
    pages["examples.md"] = "\n".join(["# Examples", "", *(f"- [{Path(path).stem}]({path})" for path in _examples())])
    for name, members in _packages().items():
        pages[f"reference/{name}.md"] = f"# tfopt.{name}\n" + "".join(
            f"\n::: tfopt.{name}.{member}\n" for member in members
        )
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))


def on_page_markdown(markdown, page, config, files):
    """Leads links out of docs/ to the files that were added."""
    return markdown.replace("](../", "](")


def _of_root(name):
    """A page of the repository's root, whose links start there."""
    return (_ROOT / name).read_text("utf-8").replace("](docs/", "](")


def _examples():
    return sorted(f"examples/{path.name}" for path in (_ROOT / "examples").glob("*.py"))


def _packages():
    """The public names of each package, as its stub exports them."""
    found = {}
    for stub in sorted((_ROOT / "tfopt").glob("*/__init__.pyi")):
        imports = [node for node in ast.parse(stub.read_text("utf-8")).body if isinstance(node, ast.ImportFrom)]
        found[stub.parent.name] = sorted(alias.asname or alias.name for node in imports for alias in node.names)
    return found
