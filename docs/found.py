"""For Sphinx: how pages are found, by the site's search and from elsewhere.

A page gets a description, which is the beginning of its first paragraph, and a preview image.
"""

import html
import re

from docutils import nodes
from sphinx import addnodes

LONGEST = 200  # characters of a description

# Words that lead to a page, or to a section of it, before all other results.
WORDS = {
    "docs/index#install": ("install", "installation", "pip", "quickstart", "quick start"),
    "docs/index#what-epsilon-means": ("epsilon",),
    "docs/index#the-change-from-svi": ("svi", "getting started"),
    "docs/cheat_sheet": ("cheat sheet", "cheatsheet"),
    "docs/play": ("sample size", "slider", "playground"),
    "docs/methods": ("methods", "which method", "choose a method"),
    "docs/methods#special-cases": ("hierarchical", "hierarchy", "random effects"),
    "docs/settings": ("settings", "delta", "learning rate"),
    "docs/course": ("course", "tutorial", "tutorials", "notebooks"),
    "docs/words": ("glossary", "definitions", "noise", "sigma"),
    "docs/examples": ("examples", "gallery"),
    "docs/tabular": ("data frame", "dataframe", "pandas", "regression", "table"),
    "docs/tabular#values-that-are-missing": ("missing", "missing values", "missing data"),
    "docs/schema#several-rows-a-person": ("several rows", "unit"),
    "docs/synthetic": ("synthetic data", "synthetic rows"),
    "docs/command_line": ("command line", "csv"),
    "docs/data#data-that-do-not-fit-into-memory": ("memory", "parquet"),
    "docs/data#predictive-new-records": ("predict", "prediction", "predictions"),
    "docs/explain#what-the-status-means": ("status",),
    "docs/explain#forecast-before-a-run": ("forecast", "power analysis"),
    "docs/pitfalls": ("pitfalls", "mistakes", "caveats", "limitations"),
    "docs/trust": ("publish", "audit"),
    "docs/trust#the-report": ("report",),
    "docs/scale#on-a-gpu": ("gpu", "cuda"),
    "docs/scale": ("cluster", "processes"),
    "docs/owners": ("federated", "federated learning", "several owners"),
    "docs/errors": ("error", "errors", "error message"),
    "docs/errors#warnings-and-status": ("warning", "warnings"),
    "docs/results": ("results", "benchmark", "benchmarks", "accuracy"),
    "docs/guarantee": ("guarantee", "privacy guarantee", "differential privacy"),
    "docs/officer": ("gdpr", "data protection", "legal"),
    "docs/threat_model": ("threat model", "threats", "attacks"),
    "docs/api/budget": ("budget", "privacy budget", "accountant", "ledger"),
}


def setup(app):
    app.connect("doctree-read", _index)
    app.connect("html-page-context", _describe)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _index(app, doctree):
    for target, words in WORDS.items():
        page, _, anchor = target.partition("#")
        if page == app.env.docname:
            entries = [("single", word, anchor, "main", None) for word in words]
            doctree.insert(0, addnodes.index(entries=entries))


def _describe(app, page, template, context, doctree):
    paragraph = doctree and doctree.next_node(nodes.paragraph)
    if not paragraph:
        return
    text = " ".join(paragraph.astext().split())
    if len(text) > LONGEST:
        text = f"{text[:LONGEST].rsplit(' ', 1)[0]} ..."
    base = app.config.html_baseurl  # without it, the address of the image is relative
    image = f"{base}_static/preview.png" if base else context["pathto"]("_static/preview.png", 1)
    properties = {
        "og:type": "website",
        "og:title": context["title"],
        "og:description": text,
        "og:image": image,
    }
    escaped = {name: _escaped(value) for name, value in properties.items()}
    tags = [f'<meta property="{name}" content="{value}">' for name, value in escaped.items()]
    tags.append(f'<meta name="description" content="{_escaped(text)}">')
    context["metatags"] += "\n".join(tags)


def _escaped(text):
    return html.escape(html.unescape(re.sub(r"<[^<>]+>", "", text)))
