"""Sphinx's settings for the web edition. `make site` (tools/build_site.py) lays out the sources."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

project = "FlashAttention and memory-efficient kernels"
author = "The FlashAttention course authors"
copyright = f"{author}. Text and figures: CC BY 4.0. Code: MIT"
language = "en"
html_baseurl = os.environ.get("SITE_URL", "").rstrip("/") + "/"  # "/": paths from the host's root

extensions = ["myst_nb", "course_site"]
root_doc = "index"
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
suppress_warnings = ["toc.empty_glob"]  # a part of the course that is not written yet

# The committed outputs are what the site shows. It runs nothing.
nb_execution_mode = "off"
nb_merge_streams = True
nb_ipywidgets_js = {}  # a committed notebook has no widget state, and this would ask another host
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 4
html_math_renderer = "mathml"  # the browser draws formulas: no script, no other host

html_theme = "sphinx_book_theme"
html_title = project
templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["course.css"]
html_favicon = "_static/favicon.svg"
html_context = {"default_mode": "auto"}  # light or dark as the reader's system says; one button
html_show_sourcelink = False
html_use_index = False
html_last_updated_fmt = None
html_theme_options = {
    "logo": {"text": "FlashAttention, a course"},
    "navbar_persistent": [],
    "show_toc_level": 2,
    "show_navbar_depth": 1,
    "use_download_button": True,
    "use_fullscreen_button": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
