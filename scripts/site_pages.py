"""Pages of the documents' site, a hook of mkdocs: the repository's own documents at their own paths.

Links between them so lead to the same place on the site as on a host of the repository. Decisions, benchmarks and a
glossary are added to the navigation as they are found.
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent

_PATTERNS = ("*.md", "docs/**/*.md", "docs/**/*.svg", "docs/*.json", "examples/**/README.md")


def paths() -> list[str]:
    """Files of the site, from the root of the repository."""
    return sorted(path.relative_to(ROOT).as_posix() for pattern in _PATTERNS for path in ROOT.glob(pattern))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Appends the groups that nobody lists by hand."""
    assert config.nav is not None
    found = paths()
    glossary = [path for path in found if path == "docs/glossary.md"]
    config.nav += [
        *({"Glossary": path} for path in glossary),
        {"Benchmarks": _group(found, "docs/benchmarks/")},
        {"Decisions": _group(found, "docs/adr/")},
    ]
    return config


def _group(pages: list[str], folder: str) -> list[str]:
    """A folder's pages, its README first."""
    inside = [path for path in pages if path.startswith(folder) and path.endswith(".md")]
    return sorted(inside, key=lambda path: (not path.endswith("README.md"), path))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The repository's documents in the place of those of `docs_dir`, and the theme's own files."""
    own = [File(path, str(ROOT), config.site_dir, config.use_directory_urls) for path in paths()]
    theme = [file for file in files if file.src_dir != config.docs_dir]
    return Files([*own, *theme])
