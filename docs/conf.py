"""The site: `make docs`. Its source is docs, and the files that docs refer to."""

import importlib.metadata
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

project = "pyro_dp"
author = "The pyro_dp developers"
copyright = "The pyro_dp developers, Apache-2.0"
release = version = importlib.metadata.version("pyro-dp")

autodoc_default_options = {
    "members": True,
    # Except members from Python, from torch, and from the base of the settings.
    "inherited-members": (
        "BaseException,Distribution,Mapping,MultivariateNormal,Protocol,Sequence,Setting,dict,object,"
        "tuple"
    ),
}

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "accessible",
    "found",
    "mathml",
    "own_names",
]

# Pages link to each other as files of the repository do, so that links hold there, too.
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "benchmarks/RESULTS.md",
    "tutorials/*.ipynb",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
]

# Sphinx need not search these: environments have a hundred thousand files.
exclude_patterns = [".*", "build", "tests"]

nitpicky = True
# Both are of an optional extra.
nitpick_ignore = [("py:class", "ClientApp"), ("py:class", "ServerApp")]
suppress_warnings = ["mystnb.unknown_mime_type"]

myst_enable_extensions = ["attrs_block", "colon_fence", "dollarmath"]
myst_heading_anchors = 4
nb_render_markdown_format = "myst"  # outputs have tables, too
nb_merge_streams = True
nb_execution_mode = "off"  # the site has them as committed; tests run them

autodoc_class_signature = "mixed"
autodoc_member_order = "bysource"
autodoc_type_aliases = {"ArrayLike": "numpy.typing.ArrayLike"}
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

# Inventories lie in the repository: builds need no network (docs/inventories.py makes them).
intersphinx_mapping = {
    "python": ("https://docs.python.org/3/", "docs/inventories/python.inv"),
    "numpy": ("https://numpy.org/doc/stable/", "docs/inventories/numpy.inv"),
    "pandas": ("https://pandas.pydata.org/docs/", "docs/inventories/pandas.inv"),
    "torch": ("https://docs.pytorch.org/docs/stable/", "docs/inventories/torch.inv"),
    "pyro": ("https://docs.pyro.ai/en/stable/", "docs/inventories/pyro.inv"),
}

copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

html_math_renderer = "mathml"
html_theme = "furo"
html_favicon = "_static/icon.svg"
html_title = "pyro_dp"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"})]
html_extra_path = ["_extra"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
pygments_style, pygments_dark_style = "a11y-light", "a11y-dark"
