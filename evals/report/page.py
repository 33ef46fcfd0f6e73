"""The report as one HTML page that needs no other file."""

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from lowrank_kv_jax.evals.report.markdown import cells, legend
from lowrank_kv_jax.evals.report.perplexities import PerplexitySection
from lowrank_kv_jax.evals.report.sections import Section

AnySection = Section | PerplexitySection

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; margin: 2rem auto; max-width:
72rem;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; border-top: 1px solid #ddd; padding-top:
1rem; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.87rem; white-space: nowrap; }
th, td { padding: 0.3rem 0.7rem; border-bottom: 1px solid #e4e4e4; text-align: right; font-variant-numeric:
tabular-nums; } th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background:
#fff; } td:first-child { font-family: ui-monospace, monospace; }
figure { margin: 1.5rem 0; } figure img { max-width: 100%; height: auto; }
figcaption, .legend { color: #555; font-size: 0.87rem; }
"""


def page(sections: Sequence[AnySection], figures: Mapping[str, Sequence[tuple[str, Path]]], title: str) -> str:
    """HTML with tables and figures inside.

    Args:
        figures: by the title of a section, captions and PNG files.
    """
    body = [f"<h1>{html.escape(title)}</h1>", _contents(sections)]
    for number, section in enumerate(sections, start=1):
        body += [f'<h2 id="s{number}">{html.escape(section.title)}</h2>', _table(section),
                 f'<p class="legend">{html.escape(legend(section))}</p>', _setting(section)]
        body += [_figure(caption, path) for caption, path in figures.get(section.title, ())]
    return ("<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
            "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
            f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
            + "\n".join(body) + "\n</body>\n</html>\n")


def _contents(sections: Sequence[AnySection]) -> str:
    items = (f'<li><a href="#s{i}">{html.escape(s.title)}</a></li>' for i, s in enumerate(sections, start=1))
    return f"<ol>{''.join(items)}</ol>"


def _table(section: AnySection) -> str:
    header, rows = cells(section)
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    lines = ("<tr>" + "".join(f"<td>{html.escape(cell.strip('`'))}</td>" for cell in row) + "</tr>"
             for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _setting(section: AnySection) -> str:
    """Where and with what the records were made, each value that occurs."""
    devices = sorted({str(r["device"]) for r in section.records if r.get("device")})
    versions = sorted({", ".join(f"{k} {v}" for k, v in r["versions"].items())
                       for r in section.records if isinstance(r.get("versions"), dict)})
    text = "; ".join([*devices, *versions])
    return f'<p class="legend">{html.escape(text)}</p>' if text else ""


def _figure(caption: str, path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    text = html.escape(caption)
    return (f'<figure><img alt="{text}" src="data:image/png;base64,{data}">'
            f"<figcaption>{text}</figcaption></figure>")
