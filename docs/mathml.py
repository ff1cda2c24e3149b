"""For Sphinx: formulas as MathML, which browsers draw without a script from another host."""

from docutils import nodes
from latex2mathml.converter import convert


def setup(app):
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _inline(translator, node):
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def _block(translator, node):
    formula = convert(node.astext(), display="block")
    translator.body.append(f'<div class="math" tabindex="0">{formula}</div>')
    raise nodes.SkipNode
