"""A feedback page: nbgrader's, that needs no network and runs nothing.

What a student wrote becomes HTML here, and an instructor opens it. So text cells are cleaned,
formulas become MathML, which a browser draws by itself, and no script is in the page: nbgrader's
own would load MathJax from another host.
"""

import re
import warnings
from pathlib import Path
from xml.etree import ElementTree

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import bleach
    import latex2mathml.converter
    import nbgrader
    from bs4 import BeautifulSoup
    from jinja2 import pass_context
    from markupsafe import escape
    from nbconvert.exporters import HTMLExporter
    from nbconvert.preprocessors import CSSHTMLHeaderPreprocessor
    from nbgrader.preprocessors import GetGrades
    from traitlets.config import Config

# What a text cell may be made of.
TAGS = set(
    "a b blockquote br code dd del details div dl dt em h1 h2 h3 h4 h5 h6 hr i img kbd li ol p "
    "pre s span strong sub summary sup table tbody td th thead tr ul".split()
)
# And a formula. latex2mathml escapes nothing, and has \href and \style: the rest is left out.
MATH_TAGS = set(
    "math menclose mfrac mi mmultiscripts mn mo mover mpadded mphantom mroot mrow mspace msqrt "
    "mstyle msub msubsup msup mtable mtd mtext mtr munder munderover none".split()
)
MATH_ATTRIBUTES = set(
    "accent columnalign columnspacing display displaystyle fence form linethickness mathvariant "
    "maxsize minsize movablelimits rowspacing scriptlevel separator stretchy symmetric "
    "width".split()
)
MATHML = "http://www.w3.org/1998/Math/MathML"
FORMULA = re.compile(r"(?<!\\)\$\$(.+?)(?<!\\)\$\$|(?<![$\\])\$(.+?)(?<![$\\])\$", re.DOTALL)
# Reading Markdown takes time that grows with the square of a hostile text's length.
MOST_TEXT, MOST_FORMULA = 10_000, 1_000
TABLES = ".rendered_html td, .rendered_html th { padding: 0.2em 0.8em; text-align: left }"
ALONE = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


class FeedbackExporter(HTMLExporter):
    """nbgrader's feedback page, alone. (Code and outputs are escaped by nbconvert anyway.)"""

    @pass_context
    def markdown2html(self, context, source):
        if len(source) > MOST_TEXT:
            return f"<pre>{escape(source)}</pre>"
        try:
            html = super().markdown2html(context, source)
            protocols = ("http", "https", "mailto", "data")
            return with_formulas(bleach.clean(html, TAGS, _attribute, protocols, strip=True))
        except (ValueError, RecursionError, AssertionError):  # text that no parser was ready for
            return f"<pre>{escape(source)}</pre>"

    def from_notebook_node(self, nb, resources=None, **kw):
        html, resources = super().from_notebook_node(nb, resources, **kw)
        page = BeautifulSoup(html, "html.parser")
        for script in page("script"):
            script.decompose()
        rule = {"http-equiv": "Content-Security-Policy", "content": ALONE}
        page.head.insert(0, page.new_tag("meta", attrs=rule))
        page.head.append(page.new_tag("style", string=TABLES))
        return str(page), resources


def exporter():
    """The exporter for one page after the other, with nbgrader's template."""
    formgrader = Path(nbgrader.__file__).parent / "server_extensions" / "formgrader"
    config = Config()
    config.FeedbackExporter.template_name = "feedback"
    config.FeedbackExporter.extra_template_basedirs = [str(formgrader / "templates")]
    css = formgrader / "static" / "node_modules" / "bootstrap" / "dist" / "css"
    config.FeedbackExporter.extra_template_paths = [str(css)]
    config.FeedbackExporter.exclude_anchor_links = True
    config.Exporter.default_preprocessors = []
    exporter = FeedbackExporter(config=config)
    exporter.register_preprocessor(GetGrades, enabled=True)
    exporter.register_preprocessor(CSSHTMLHeaderPreprocessor, enabled=True)
    return exporter


def with_formulas(html):
    """Clean HTML, each $formula$ outside of code as MathML."""
    page = BeautifulSoup(html, "html.parser")
    for text in page.find_all(string=FORMULA):
        if not text.find_parent(["code", "pre", "kbd"]):
            parts, end = [], 0
            for found in FORMULA.finditer(text):
                block, inline = found.groups()
                parts += [escape(text[end : found.start()]), mathml(block or inline, bool(block))]
                end = found.end()
            html = "".join([*map(str, parts), escape(text[end:])])
            text.replace_with(BeautifulSoup(html, "html.parser"))
    return str(page)


def mathml(tex, block):
    """A formula as MathML; as it was written, if it is none."""
    try:
        if len(tex) > MOST_FORMULA:
            raise ValueError("too long")
        display = "block" if block else "inline"
        root = ElementTree.fromstring(latex2mathml.converter.convert(tex, display=display))
    except Exception:  # latex2mathml raises many kinds, and this is somebody's typing error
        return f"<code>{escape(tex)}</code>"
    _only_math(root)
    ElementTree.register_namespace("", MATHML)
    return ElementTree.tostring(root, encoding="unicode")


def _only_math(element):
    element.attrib = {k: v for k, v in element.attrib.items() if k in MATH_ATTRIBUTES}
    for child in list(element):
        if child.tag.removeprefix(f"{{{MATHML}}}") in MATH_TAGS:
            _only_math(child)
        else:
            element.remove(child)


def _attribute(tag, name, value):
    if tag == "img":
        return name in ("alt", "title") or (name == "src" and value.startswith("data:image/"))
    return name in ("class", "title") or (tag == "a" and name == "href")
