"""The page: one HTML file that needs nothing else, neither scripts nor fonts nor pictures from anywhere."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from gsplit.files.atomic import write_atomic

__all__ = ["Picture", "Section", "Table", "write_page", "write_pictures"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #212529; background: #fff; max-width: 1200px; margin: 2em auto }
h1 { font-size: 1.6em }
h2 { font-size: 1.25em; margin-top: 2em; border-bottom: 1px solid #ced4da }
nav a { margin-right: 1em }
img { max-width: 100%; height: auto }
figure { margin: 1em 0 }
figcaption { color: #495057; font-size: .9em }
table { border-collapse: collapse; font-size: .85em; display: block; overflow-x: auto; margin: 1em 0 }
caption { text-align: left; font-weight: 600 }
th, td { padding: .2em .7em .2em 0; text-align: left; vertical-align: top; border-bottom: 1px solid #e9ecef }
td { font-variant-numeric: tabular-nums }
"""


@dataclass(frozen=True)
class Table:
    """Cells as text; ``caption`` says what they are."""

    caption: str
    columns: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Picture:
    """A picture as PNG, with the name of its file, without ending, and what it shows."""

    name: str
    png: bytes
    caption: str


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    name: str
    title: str
    text: str = ""
    tables: list[Table] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)


def write_page(sections: Sequence[Section], path: Path) -> None:
    """Write the page; the file is there whole or not at all."""
    links = "".join(f'<a href="#{escape(s.name)}">{escape(s.title)}</a>' for s in sections)
    body = "\n".join(_section(section) for section in sections)
    page = f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>GSplit report</title><style>{_STYLE}</style></head>
<body>
<h1>GSplit report</h1>
<nav>{links}</nav>
{body}
</body>
</html>
"""
    write_atomic(path, [page.encode()])


def _section(section: Section) -> str:
    parts = [f'<section id="{escape(section.name)}">', f"<h2>{escape(section.title)}</h2>"]
    if section.text:
        parts.append(f"<p>{escape(section.text)}</p>")
    parts += [_table(table) for table in section.tables]
    for picture in section.pictures:
        data = base64.b64encode(picture.png).decode()
        caption = escape(picture.caption)
        image = f'<img src="data:image/png;base64,{data}" alt="{escape(picture.name)}: {caption}">'
        parts.append(f"<figure>{image}<figcaption>{caption}</figcaption></figure>")
    return "\n".join([*parts, "</section>"])


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    rows = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    caption = f"<caption>{escape(table.caption)}</caption>"
    return f"<table>{caption}\n<thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table>"


def write_pictures(sections: Sequence[Section], folder: Path) -> list[Path]:
    """Write every picture as a PNG file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for picture in (picture for section in sections for picture in section.pictures):
        path = folder / f"{_file_name(picture.name)}.png"
        path.write_bytes(picture.png)
        paths.append(path)
    return paths


def _file_name(name: str) -> str:
    """Names of graphs and runs are the user's.

    >>> _file_name("stages-a/b c")
    'stages-a-b-c'
    """
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)
