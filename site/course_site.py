"""What the web edition adds to Sphinx, myst-nb and the theme.

- formulas as MathML, which browsers draw themselves
- a notebook's picture and its caption as one <figure>, with alt text
- the first use of a term on a page is a link to the glossary, with its meaning as tooltip
- links to a notebook's file, in text or in the card of a check, lead to its page
- explorers: precomputed frames behind a few controls (see `explorer_html`)
- head of the page: description and social card; sitemap.xml; a 404 page that works at any address
"""

import base64
import json
import posixpath
import re
from html import escape
from pathlib import Path
from urllib.parse import unquote, urlsplit

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.addnodes import pending_xref
from sphinx.util.docutils import SphinxDirective

from attention_lib.glossary import TERMS

GLOSSARY = "docs/glossary"
DESCRIPTION = "A course you run: attention, FlashAttention, and every byte that they move."
NOTEBOOK_FILE = re.compile(r"(?:\.\./)?(?:(notebooks|exercises)/)?(\w+)\.ipynb")


# ---------------------------------------------------------------- formulas


def mathml(tex, block):
    """One formula as <math>. A command that docutils does not know ends the build."""
    return tex2mathml(re.sub(r"\\mathrel\{(.)\}", r"\1", tex), as_block=block)


def visit_math(self, node):
    formula = mathml(node.astext(), block=False)
    if len(node.astext()) > 40:
        formula = formula.replace("<math", '<math class="long"', 1)
    self.body.append(formula)
    raise nodes.SkipNode


def visit_math_block(self, node):
    # A long formula scrolls by itself, not the page; and what scrolls can be reached by keyboard.
    formula = mathml(node.astext(), block=True)
    self.body.append(f'<div class="math" tabindex="0" role="group">{formula}</div>\n')
    raise nodes.SkipNode


# ---------------------------------------------------------------- pictures


def bundles(doctree):
    """The outputs of code cells: myst-nb keeps each kind of an output in a container."""
    for output in doctree.findall(nodes.container):
        if output.get("nb_element") == "mime_bundle":
            yield output, {kind.get("mime_type"): kind for kind in output.children}


def is_caption(output):
    return any(
        kind.get("mime_type") == "text/markdown" and kind.astext().startswith("Figure: ")
        for kind in output.children
    )


def make_figures(app, doctree):
    """attention_lib.show.figure gives the words as text/plain beside the PNG, then as a caption."""
    captions = []
    for output, kinds in list(bundles(doctree)):
        if "image/png" not in kinds:
            continue
        image = next(kinds["image/png"].findall(nodes.image))
        image["alt"] = kinds["text/plain"].astext()
        siblings = output.parent.children
        after = siblings[siblings.index(output) + 1 :]
        if after and is_caption(after[0]):
            captions.append(after[0])
            caption = nodes.caption("", image["alt"])
            name = f"figure-{len(captions)}"
            output.replace_self(nodes.figure("", image, caption, ids=[name]))
    for caption in captions:
        caption.parent.remove(caption)


# ---------------------------------------------------------------- glossary


def term_id(term):
    return "term-" + re.sub(r"[^a-z0-9]+", "-", term.lower()).strip("-")


def spellings():
    """{spelling: term}, for the terms that mean the same wherever they stand.

    Keys may be on a keyboard, a page or an output may be this one, and D is a letter.
    """
    everyday = set("account align D keys output page passes statistics values".split())
    found = {}
    for entry in TERMS:
        if entry.term not in everyday:
            name, _, short = entry.term.partition(" (")
            found[name] = entry
            if short:
                found[short.rstrip(")")] = entry
    return found


SPELLINGS = spellings()
_LONGEST_FIRST = sorted(SPELLINGS, key=len, reverse=True)
TERM = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, _LONGEST_FIRST))})(s?)(?![\w-])", re.I)
NO_TERMS_IN = (
    nodes.reference, nodes.title, nodes.literal, nodes.literal_block, nodes.FixedTextElement,
    nodes.math, nodes.math_block, nodes.raw, nodes.caption, nodes.thead, pending_xref,
)  # fmt: skip


def spelled(match):
    """The term that was matched, or None: HBM and FLOP are written so and in no other way."""
    for name in (match[1], match[1][0].lower() + match[1][1:]):
        if name in SPELLINGS:
            return SPELLINGS[name]
    return None


def list_terms(app, doctree):
    """The glossary's table as a list, which fits any width. Each term has an id to link to."""
    if app.env.docname != GLOSSARY:
        return
    for table in list(doctree.findall(nodes.table)):
        head, *rows = table.findall(nodes.row)
        columns = [cell.astext() for cell in head.children]
        items = nodes.definition_list(classes=["glossary"])
        for row in rows:
            cells = [cell.children[0].children for cell in row.children]
            term, symbol, meaning, *rest = cells
            name = nodes.term("", "", *term, ids=[term_id(row.children[0].astext())])
            name += [nodes.Text(" "), *symbol] if symbol else []
            details = nodes.paragraph(classes=["details"])
            for label, content in zip(columns[3:], rest, strict=True):
                if content:
                    details += [nodes.Text(f"{'. ' if len(details) else ''}{label}: "), *content]
            definition = nodes.definition("", nodes.paragraph("", "", *meaning), details)
            items += nodes.definition_list_item("", name, definition)
        table.replace_self(items)


def link_terms(app, doctree, docname):
    if not docname.startswith(("notebooks/", "exercises/", "index")):
        return
    page = app.builder.get_relative_uri(docname, GLOSSARY)
    seen = set()
    for text in list(doctree.findall(nodes.Text)):
        parent = text.parent
        while parent is not None and not isinstance(parent, NO_TERMS_IN):
            if parent.get("nb_element") == "cell_code_output":
                break
            parent = parent.parent
        if parent is not None:
            continue
        parts, start = [], 0
        for match in TERM.finditer(text):
            entry = spelled(match)
            if entry is None or entry.term in seen:
                continue
            seen.add(entry.term)
            parts.append(nodes.Text(text[start : match.start()]))
            target = f"{page}#{term_id(entry.term)}"
            link = nodes.reference("", match[0], refuri=target, internal=True, classes=["term"])
            link["reftitle"] = entry.meaning
            parts.append(link)
            start = match.end()
        if parts:
            parts.append(nodes.Text(text[start:]))
            text.parent.replace(text, parts)


# ---------------------------------------------------------------- links to notebooks


def unwritten_notebooks(app, doctree):
    """A notebook that is announced but not there yet is a name, not a link."""
    for link in list(doctree.findall(pending_xref)):
        if link.get("refdomain") != "doc" and NOTEBOOK_FILE.fullmatch(link["reftarget"]):
            link.replace_self(link.children)


def heading_ids(env, docname):
    """{heading as JupyterLab writes it in an address: its id on the page}"""
    return {
        link.astext().replace(" ", "-"): link["anchorname"]
        for link in env.tocs[docname].findall(nodes.reference)
    }


def page_of(app, address, docname):
    """The address of a page, from that of a notebook's file, which may name a heading.

    A notebook of this course is in notebooks/ if the address does not say. None if it is no page.
    """
    parts = urlsplit(address)
    found = NOTEBOOK_FILE.fullmatch(parts.path)
    target = f"{found[1] or 'notebooks'}/{found[2]}" if found else None
    if target not in app.env.found_docs:
        return None
    anchor = heading_ids(app.env, target).get(unquote(parts.fragment), "")
    return app.builder.get_relative_uri(docname, target) + anchor


def link_pages(app, doctree, docname):
    """In an output's HTML: links to notebooks, and the marks of explorers."""

    def to_page(match):
        page = page_of(app, match[1].replace("&#x27;", "'"), docname)
        return match[0] if page is None else f'href="{escape(page or "#")}"'

    for raw in list(doctree.findall(nodes.raw)):
        text = re.sub(r'href="([^"]+\.ipynb(?:#[^"]*)?)"', to_page, raw.astext())
        mark = re.search(r'data-explorer="([\w-]+)"', text)
        text = explorer_html(app, mark[1], docname) if mark and mark[1] in frames() else text
        raw.replace_self(nodes.raw("", text, format="html"))


# ---------------------------------------------------------------- explorers


def frames():
    """{name: function that returns its frames}, or nothing while there are no explorers.

    A frame is (state, picture, alt): state is a dict from a control's label to its value, picture
    is an <svg> as text or a PNG as bytes.
    """
    try:
        from attention_lib.show.explorers import FRAMES
    except ModuleNotFoundError as error:
        if error.name != "attention_lib.show.explorers":
            raise
        return {}
    return FRAMES


def picture_html(picture, alt):
    if isinstance(picture, bytes):
        data = base64.b64encode(picture).decode()
        return f'<img alt="{escape(alt)}" src="data:image/png;base64,{data}">'
    return picture


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def controls(all_frames):
    """{label: its values}: numbers by size, others as they come."""
    values = {}
    for state, *_ in all_frames:
        for label, value in state.items():
            if value not in values.setdefault(label, []):
                values[label].append(value)
    return {k: sorted(v) if all(map(is_number, v)) else v for k, v in values.items()}


def words(value):
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, (int, float)) else str(value)


def control_html(label, values, start):
    """A slider for numbers, else a list to choose from. Its value is a place in `values`."""
    name, texts, at = escape(label), [escape(words(v)) for v in values], values.index(start)
    if all(map(is_number, values)) and len(values) > 2:
        return (
            f'<label>{name} <input type="range" min="0" max="{len(values) - 1}" value="{at}" '
            f'data-control="{name}" data-texts="{escape(json.dumps(texts))}" '
            f'aria-valuetext="{texts[at]}" autocomplete="off"> '
            f'<span aria-hidden="true">{texts[at]}</span></label>'
        )
    options = "".join(
        f'<option value="{i}"{" selected" if i == at else ""}>{text}</option>'
        for i, text in enumerate(texts)
    )
    return (
        f'<label>{name} <select data-control="{name}" autocomplete="off">{options}</select></label>'
    )


def explorer_html(app, name, docname):
    """The first frame of an explorer, with its controls. The others are in a file beside the page.

    The file is a script that _static/frames.js loads when a control is first used. Without scripts
    the controls stay hidden and the first frame is a picture like any other.
    """
    all_frames = frames()[name]()
    values = controls(all_frames)
    data = [
        [[values[k].index(v) for k, v in state.items()], picture_html(picture, alt), alt]
        for state, picture, alt in all_frames
    ]
    folder = app.outdir / "_static" / "frames"
    folder.mkdir(parents=True, exist_ok=True)
    script = f"courseFrames({json.dumps(name)}, {json.dumps(data)});\n"
    (folder / f"{name}.js").write_text(script, encoding="utf-8")
    root = posixpath.relpath("_static", posixpath.dirname(docname) or ".")
    start, _, alt = all_frames[0]
    rows = "".join(control_html(k, options, start[k]) for k, options in values.items())
    return (
        f'<div class="frames" data-frames="{name}" data-src="{root}/frames/{name}.js">'
        f'<div class="frames-controls" role="group" aria-label="{name}" hidden>{rows}</div>'
        f'<div class="frames-picture">{data[0][1]}</div>'
        f'<p class="frames-words" role="status">{escape(alt)}</p></div>'
    )


class Explorer(SphinxDirective):
    """{explorer} name: an explorer, or while it has no frames the content: a still, a sentence."""

    required_arguments = 1
    has_content = True

    def run(self):
        name = self.arguments[0]
        if name in frames():
            html = explorer_html(self.env.app, name, self.env.docname)
            return [nodes.raw("", html, format="html")]
        return self.parse_content_to_nodes()


class MovingPicture(SphinxDirective):
    """{moving-picture} file.svg: the picture in the page, where it follows its theme.

    It moves by its own style sheet, and stands still for readers who asked for less motion. A
    button stops it for the others.
    """

    required_arguments = 1

    def run(self):
        path = Path(self.env.srcdir) / self.arguments[0]
        self.env.note_dependency(path)
        button = '<button type="button" class="btn btn-sm pause" hidden>Pause</button>'
        svg = path.read_text(encoding="utf-8")
        group = 'class="moving" tabindex="0" role="group" aria-label="Moving picture"'
        html = f"<div {group}>{svg}{button}</div>"
        return [nodes.raw("", html, format="html")]


# ---------------------------------------------------------------- head, sitemap, 404


def add_head(app, pagename, templatename, context, doctree):
    text = doctree and next((p.astext() for p in doctree.findall(nodes.paragraph)), "")
    text = " ".join(text.split()) if text else DESCRIPTION
    if len(text) > 160:
        text = text[:157].rsplit(" ", 1)[0] + " ..."
    title = re.sub(r"<[^>]*>", "", context.get("title", ""))
    meta = {"description": text, "twitter:card": "summary_large_image"}
    card = f"{app.config.html_baseurl}_static/social-card.png"
    graph = {
        "og:title": title, "og:description": text, "og:type": "website", "og:image": card,
        "og:image:alt": "The scores of attention as a grid of tiles, one of them on chip.",
        "og:site_name": app.config.project,
    }  # fmt: skip
    tags = [f'<meta name="{k}" content="{escape(v)}">' for k, v in meta.items()]
    tags += [f'<meta property="{k}" content="{escape(v)}">' for k, v in graph.items()]
    context["metatags"] = context.get("metatags", "") + "\n".join(tags)


def finish(app, error):
    if error or app.builder.format != "html":
        return
    base, out = app.config.html_baseurl, app.outdir
    pages = sorted(d for d in app.env.found_docs if d != "404")
    urls = (f"<url><loc>{escape(base + app.builder.get_target_uri(d))}</loc></url>" for d in pages)
    namespace = "http://www.sitemaps.org/schemas/sitemap/0.9"
    sitemap = f'<?xml version="1.0" encoding="utf-8"?>\n<urlset xmlns="{namespace}">\n'
    (out / "sitemap.xml").write_text(sitemap + "\n".join(urls) + "\n</urlset>\n", encoding="utf-8")
    # A host shows 404.html under the address that was asked for, so its links start at the root.
    page = out / "404.html"
    if page.is_file():
        path = urlsplit(base).path
        text = page.read_text(encoding="utf-8")
        local = r'\b(href|src|action|data-content_root)="(?![a-z]+:|[#/])(?:\./)?([^"]*)"'
        page.write_text(re.sub(local, rf'\1="{path}\2"', text), encoding="utf-8")


def setup(app):
    inline, block = (visit_math, None), (visit_math_block, None)
    app.add_html_math_renderer("mathml", inline_renderers=inline, block_renderers=block)
    app.add_directive("explorer", Explorer)
    app.add_directive("moving-picture", MovingPicture)
    app.add_js_file("frames.js", loading_method="defer")
    app.connect("doctree-read", make_figures)
    app.connect("doctree-read", list_terms)
    app.connect("doctree-read", unwritten_notebooks)
    app.connect("doctree-resolved", link_terms)
    app.connect("doctree-resolved", link_pages)
    app.connect("html-page-context", add_head)
    app.connect("build-finished", finish)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
