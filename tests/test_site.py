"""The web edition: built once, then its files are read, and every page is opened in a browser.

COURSE_SITE_SCREENSHOTS=folder keeps a picture of each page, light, dark and at 400% zoom.
"""

import http.server
import os
import re
import struct
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit
from xml.etree import ElementTree

import nbformat
import pytest

from attention_lib.glossary import TERMS
from attention_lib.show.explorers import FRAMES
from tests.browser import FLAGS, find_browser

html5lib = pytest.importorskip("html5lib", reason="needs html5lib (the dev extra)")

ROOT = Path(__file__).resolve().parent.parent
SITE_URL = "https://course.example/attention"  # the site need not be at a host's root
SOURCES = [
    path
    for pattern in ("notebooks/*.ipynb", "exercises/*.ipynb", "docs/*.md")
    for path in sorted(ROOT.glob(pattern))
]
NAMES = [path.relative_to(ROOT).with_suffix("").as_posix() for path in SOURCES]
PAGES = ["index", "explorers", *NAMES]
EMPTY = (None, "", "#")


def run(command, **environment):
    """What the build said, if it went well without a word of warning."""
    env = {k: v for k, v in os.environ.items() if k != "SITE_URL"} | environment
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, env=env, capture_output=True, text=True
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "WARNING" not in said, said[-4000:]
    return said


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder that `make site` would fill: a warning of Sphinx fails the build."""
    folder = tmp_path_factory.mktemp("web") / "site"
    run(["tools/build_site.py", "--to", folder], SITE_URL=SITE_URL)
    return folder


class Page:
    """A page as a tree, with what the parser found wrong in it."""

    def __init__(self, path):
        self.text = path.read_text(encoding="utf-8")
        parser = html5lib.HTMLParser(namespaceHTMLElements=False)
        self.tree = parser.parse(self.text)
        self.errors = parser.errors
        self.ids = [e.get("id") for e in self.tree.iter() if e.get("id")]

    def all(self, *tags):
        return [e for e in self.tree.iter() if e.tag in tags]


@pytest.fixture(scope="module")
def pages(site):
    """{address from the site's root: Page}"""
    files = [p for p in site.rglob("*.html") if "_static" not in p.parts]
    return {path.relative_to(site).as_posix(): Page(path) for path in files}


def words(element):
    return " ".join("".join(element.itertext()).split())


# ---------------------------------------------------------------- what is there


def test_every_source_is_a_page_and_nothing_else_is(pages):
    own = {"search.html", "404.html"}
    assert set(pages) == {f"{name}.html" for name in PAGES} | own


def test_the_contents_list_every_notebook_in_the_order_of_the_course(pages):
    links = [a.get("href") for a in pages["index.html"].tree.findall(".//article//li/a")]
    assert links == [f"{name}.html" for name in sorted(PAGES[1:], key=in_order)]


def in_order(name):
    reference = ["explorers", "docs/glossary", "docs/cheat_sheet", "docs/instructors"]
    if name in reference:
        return 2, reference.index(name)
    return ["notebooks", "exercises"].index(name.partition("/")[0]), name


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("notebooks/")])
def test_a_notebook_brings_its_prose_its_outputs_and_its_pictures(pages, name):
    page = pages[f"{name}.html"]
    article = page.tree.find(".//article")
    shown = re.sub(r"\s", "", words(article))
    nb = nbformat.read(ROOT / f"{name}.ipynb", as_version=4)
    alts = []
    for cell in nb.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "stream":
                assert re.sub(r"\s", "", output.text) in shown, output.text
            if "image/png" in output.get("data", {}):
                alts.append(output.metadata["image/png"]["alt"])
    figures = page.all("figure")
    assert [f.find(".//img").get("alt") for f in figures] == alts
    captions = [words(f.find("figcaption").find(".//*[@class='caption-text']")) for f in figures]
    assert captions == [" ".join(alt.split()) for alt in alts]
    assert [f.get("id") for f in figures] == [f"figure-{i + 1}" for i in range(len(alts))]


def test_formulas_are_mathml_and_none_is_left_as_tex(pages):
    counted = Counter()
    for name, page in pages.items():
        counted[name] = len(page.all("{http://www.w3.org/1998/Math/MathML}math"))
        for e in page.tree.find(".//body").iter():
            if e.tag not in ("code", "pre", "script", "span"):
                assert not re.search(r"\\(frac|sqrt|sum|text|cdot)\b|\$\$", e.text or ""), name
    assert counted["docs/cheat_sheet.html"] >= 30
    assert counted["notebooks/02_softmax_one_piece_at_a_time.html"] >= 10


# ---------------------------------------------------------------- links


def test_every_link_leads_somewhere(site, pages):
    checked, broken = 0, []
    for name, page in pages.items():
        if name == "404.html":  # its links begin with the site's address: below
            continue
        for e in page.tree.iter():
            for key in ("href", "src"):
                link = e.get(key)
                if link in EMPTY or urlsplit(link).scheme == "data":
                    continue
                if urlsplit(link).scheme:
                    assert re.fullmatch(r"https?://[\w.-]+\.\w+(/\S*)?|mailto:\S+@\S+", link), link
                    continue
                parts = urlsplit(urljoin(name, link))
                target, anchor = unquote(parts.path), unquote(parts.fragment)
                checked += 1
                if not (site / target).is_file() or ".." in target:
                    broken.append(f"{name}: {link}")
                elif anchor and anchor not in pages[target].ids:
                    broken.append(f"{name}: {link} (no such place)")
    assert not broken, "\n".join(broken)
    assert checked > 100 * len(PAGES)


def test_a_link_to_a_notebook_is_a_link_to_its_page(pages):
    for name, page in pages.items():
        for a in page.tree.findall(".//article//a"):
            assert ".ipynb" not in a.get("href", ""), (name, a.get("href"))
    assert ".ipynb" in pages["notebooks/03_tiled_attention.html"].text  # the button that downloads


def test_terms_lead_to_the_glossary_at_their_first_use(pages):
    entries = {e.get("id") for e in pages["docs/glossary.html"].all("dt")}
    assert len(entries) == len(TERMS) and all(e.startswith("term-") for e in entries)
    linked = set()
    for name, page in pages.items():
        links = [a for a in page.all("a") if "term" in (a.get("class") or "").split()]
        targets = [a.get("href").partition("#")[2] for a in links]
        assert len(targets) == len(set(targets)), name
        assert set(targets) <= entries and all(a.get("title") for a in links)
        if name.startswith("notebooks/"):
            assert len(links) >= 4, name
        linked |= set(targets)
    assert len(linked) > 0.7 * len(TERMS)


def test_the_first_use_is_the_first(pages):
    article = pages["notebooks/03_tiled_attention.html"].tree.find(".//article")
    first = next(p for p in article.iter("p") if "tile" in words(p))
    assert any(words(a) in ("tile", "tiles") for a in first.iter("a")), words(first)


# ---------------------------------------------------------------- valid HTML

BLOCKS = {"div", "p", "table", "ul", "ol", "dl", "pre", "figure", "section", "h1", "h2", "h3"}
PHRASING = ("span", "p", "a", "h1", "h2", "h3", "h4", "button", "label", "em", "strong", "code")


@pytest.mark.parametrize("name", ["404", "search", *PAGES])
def test_the_html_is_valid(pages, name):
    page = pages[f"{name}.html"]
    assert not page.errors, [(where, code) for where, code, _ in page.errors]
    assert page.tree.get("lang") == "en" and len(page.all("title")) == 1
    assert [i for i, n in Counter(page.ids).items() if n > 1] == []
    for e in page.tree.iter():
        for key in ("aria-labelledby", "aria-describedby", "aria-controls", "for"):
            for target in (e.get(key) or "").split():
                assert target in page.ids, (e.tag, key, target)
    for e in page.all(*PHRASING):
        inside = {child.tag for child in e.iter() if isinstance(child.tag, str)} - {e.tag}
        assert e.tag == "a" or not inside & BLOCKS, (e.tag, inside & BLOCKS)
        assert not inside & {"a", "button"} or e.tag not in ("a", "button"), e.tag
    for image in page.all("img"):
        assert len(image.get("alt") or "") >= 20, image.attrib
    assert not page.all("center", "font", "marquee", "tt", "big")


# ---------------------------------------------------------------- around the pages


def test_the_sitemap_names_every_page_and_only_pages(site):
    tree = ElementTree.parse(site / "sitemap.xml")
    found = {e.text for e in tree.iter("{http://www.sitemaps.org/schemas/sitemap/0.9}loc")}
    assert found == {f"{SITE_URL}/{name}.html" for name in PAGES}


def test_a_link_shown_elsewhere_has_a_card(site, pages):
    card = (site / "_static" / "social-card.png").read_bytes()
    assert card[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", card[16:24]) == (1200, 630)
    for name in PAGES:
        meta = {
            m.get("property") or m.get("name"): m.get("content")
            for m in pages[f"{name}.html"].all("meta")
        }
        assert meta["og:image"] == f"{SITE_URL}/_static/social-card.png"
        assert len(meta["og:title"]) > 5 and 20 < len(meta["description"]) <= 161, meta
        assert "<" not in meta["og:title"] + meta["description"]


def test_without_an_address_the_pages_are_the_same(site):
    """SITE_URL is for the sitemap, the card and the 404 page; other pages do not depend on it."""
    text = (site / "notebooks" / "03_tiled_attention.html").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if SITE_URL in line]
    assert lines and all("og:image" in x or 'rel="canonical"' in x for x in lines), lines


def test_only_what_is_on_the_site_is_loaded(pages):
    for name, page in pages.items():
        for e in page.all("script", "img", "link", "iframe", "source", "video", "object"):
            address = e.get("src") or (e.get("href") if e.get("rel") != "canonical" else None) or ""
            assert urlsplit(address).scheme in ("", "data"), (name, e.attrib)


# ---------------------------------------------------------------- in a browser

LCP = """() => new Promise(done => new PerformanceObserver(list =>
    done(list.getEntries().at(-1).startTime)).observe({type: 'largest-contentful-paint',
    buffered: true}))"""
WEIGHT = 2_000_000  # bytes of a first page
PAINTED = 2_000  # ms


class Server(http.server.ThreadingHTTPServer):
    """The site under /attention/, as SITE_URL says, with its 404 page. It counts what it sends."""

    daemon_threads = True

    def __init__(self, folder):
        class Handler(http.server.SimpleHTTPRequestHandler):
            def __init__(self, *args):
                super().__init__(*args, directory=folder)

            def translate_path(self, path):
                inside = urlsplit(path).path.removeprefix("/attention")
                return super().translate_path(inside if inside != path else "/none")

            def send_error(self, code, *_):
                body = (folder / "404.html").read_bytes()
                self.send_response(code)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def copyfile(self, source, output):
                data = source.read()
                self.server.sent += len(data)
                output.write(data)

            def log_message(self, *_):
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.sent = 0
        self.url = f"http://127.0.0.1:{self.server_port}/attention/"


@pytest.fixture(scope="module")
def served(site):
    server = Server(site)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright (the dev extra)")
    executable = find_browser()
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        yield browser
        browser.close()


class Visit:
    """A fresh page in the browser; what it asked other hosts for, and what its console showed."""

    def __init__(self, browser, **options):
        self.foreign, self.errors = [], []
        options = {"viewport": {"width": 1280, "height": 900}} | options
        self.context = browser.new_context(**options)
        self.context.route("**/*", self._route)
        self.page = self.context.new_page()
        self.page.on("pageerror", lambda e: self.errors.append(f"uncaught: {e}"))
        self.page.on("console", lambda m: m.type == "error" and self.errors.append(m.text))

    def _route(self, route):
        if urlsplit(route.request.url).hostname in ("127.0.0.1", None):
            route.continue_()
        else:
            self.foreign.append(route.request.url)
            route.abort()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.context.close()


@pytest.fixture(scope="module")
def axe():
    package = pytest.importorskip("axe_playwright_python", reason="needs axe (the dev extra)")
    return (Path(package.__file__).parent / "axe.min.js").read_text(encoding="utf-8")


def faults(page):
    """axe-core's serious and critical findings, each with a place."""
    # preload: axe would ask for style sheets again, and where it guesses them.
    found = page.evaluate("axe.run(document, {resultTypes: ['violations'], preload: false})")
    return [
        f"{fault['id']} ({fault['impact']}): {fault['nodes'][0]['html'][:200]}"
        for fault in found["violations"]
        if fault["impact"] in ("serious", "critical")
    ]


# [colour, background, needed] for every kind of text on the page, colours as [r, g, b, ...]
TEXTS = """() => {
    const opaque = e => {
        const own = getComputedStyle(e).backgroundColor;
        return own == 'rgba(0, 0, 0, 0)' && e.parentElement ? opaque(e.parentElement) : own;
    };
    const kinds = new Set();
    for (const e of document.body.querySelectorAll('*:not(svg *, script, noscript *)')) {
        const text = [...e.childNodes].some(n => n.nodeType == 3 && n.data.trim());
        if (!text || !e.checkVisibility()) continue;
        const s = getComputedStyle(e), size = parseFloat(s.fontSize);
        const large = size >= 24 || size >= 18.66 && s.fontWeight >= 700;
        kinds.add([s.color, opaque(e), large ? 3 : 4.5].join('|'));
    }
    return [...kinds].map(k => k.split('|')).map(
        ([a, b, n]) => [...[a, b].map(c => c.match(/[0-9.]+/g).map(Number)), Number(n)]);
}"""
# A word of a listing is a span: thousands, which cost axe minutes. TEXTS looks at each of them.
FLATTEN = "document.querySelectorAll('.highlight pre').forEach(e => e.textContent = e.textContent)"
# A page takes the browser three seconds: all of them in CI, elsewhere one of each kind.
ONE_OF_EACH = [
    "index", "explorers", "404", "search", "docs/glossary", "docs/cheat_sheet",
    "notebooks/03_tiled_attention", "exercises/ex02_algorithm_1",
]  # fmt: skip
IN_CI = os.environ.get("COURSE_CI", "") not in ("", "0")
VISITED = ["404", "search", *PAGES] if IN_CI else ONE_OF_EACH


def contrast(one, other):
    """WCAG 2.2's contrast ratio of two colours (r, g, b), 0 to 255."""

    def luminance(colour):
        parts = (c / 255 for c in colour[:3])
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_contrast_is_that_of_wcag():
    assert contrast((0, 0, 0), (255, 255, 255)) == pytest.approx(21)
    assert contrast((118, 118, 118), (255, 255, 255)) == pytest.approx(4.54, abs=0.01)  # #767676


@pytest.fixture(scope="module")
def reader(browser):
    """One visit for all pages: what a page loads again comes from the browser's memory."""
    with Visit(browser, color_scheme="light", reduced_motion="reduce") as visit:
        yield visit


@pytest.mark.browser
@pytest.mark.parametrize("name", VISITED)
def test_a_page_in_the_browser(served, reader, axe, name):
    """Light and dark, wide and at 400% zoom: nothing foreign, no error, no serious fault."""
    page, keep = reader.page, os.environ.get("COURSE_SITE_SCREENSHOTS")
    reader.foreign.clear(), reader.errors.clear()
    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto(f"{served.url}{name}.html", wait_until="load")
    pale, problems = [], []

    def show(scheme):
        page.emulate_media(color_scheme=scheme)
        page.wait_for_function(f"document.documentElement.dataset.theme == '{scheme}'")

    for scheme in ("light", "dark"):
        show(scheme)
        texts = page.evaluate(TEXTS)
        assert len(texts) >= 3
        pale += [(scheme, *text) for text in texts if contrast(*text[:2]) < text[2]]
        if keep:
            page.screenshot(path=Path(keep) / f"{Path(name).name}-{scheme}.png", full_page=True)
    page.evaluate(FLATTEN)
    page.evaluate(axe)
    for scheme in ("dark", "light"):
        show(scheme)
        problems += faults(page)
    page.set_viewport_size({"width": 320, "height": 256})  # 1280 x 1024 at 400%
    wide = page.evaluate("document.documentElement.scrollWidth")
    if keep:
        page.screenshot(path=Path(keep) / f"{Path(name).name}-zoom.png")
    assert not reader.foreign, reader.foreign
    assert not reader.errors, reader.errors
    assert not problems, problems
    assert not pale, f"too little contrast: {pale}"
    assert wide <= 320, f"at 400% zoom the page is {wide} pixels wide: it scrolls sideways"


@pytest.mark.browser
@pytest.mark.parametrize("name", ["index", "notebooks/13_what_the_papers_measured"])
def test_a_first_page_is_small_and_soon_there(served, browser, name, record_property):
    times = []
    for _ in range(3):  # on a busy machine the first may be late
        with Visit(browser) as visit:
            served.sent = 0
            visit.page.goto(f"{served.url}{name}.html", wait_until="networkidle")
            times.append(visit.page.evaluate(LCP))
            weight = served.sent
        if times[-1] < PAINTED:
            break
    record_property("bytes", weight)
    record_property("largest contentful paint, ms", round(min(times)))
    print(f"{name}: {weight:,} bytes, largest contentful paint {min(times):.0f} ms")
    assert 100_000 < weight < WEIGHT
    assert min(times) < PAINTED


@pytest.mark.browser
def test_search_finds_a_page(served, browser):
    with Visit(browser) as visit:
        visit.page.goto(f"{served.url}search.html?q=butterfly")
        results = visit.page.locator("#search-results ul.search li a")
        results.first.wait_for()
        assert any("10_block_sparse" in a.get_attribute("href") for a in results.all())
        assert not visit.foreign and not visit.errors


@pytest.mark.browser
def test_a_wrong_address_shows_a_page_that_leads_back(served, browser):
    with Visit(browser) as visit:
        answer = visit.page.goto(f"{served.url}no/such/page")
        assert answer.status == 404
        assert visit.page.locator("h1").first.inner_text().startswith("This page is not here")
        family = "getComputedStyle(document.querySelector('nav')).display"  # its style sheets came
        assert (
            visit.page.evaluate(family) and visit.page.evaluate("document.styleSheets.length") > 3
        )
        visit.page.get_by_role("link", name="start page").click()
        visit.page.wait_for_url(f"{served.url}index.html")
        assert len(visit.errors) == 1, visit.errors  # that of the address itself


@pytest.mark.browser
def test_a_dark_page_prints_black_on_white(served, browser):
    with Visit(browser, color_scheme="dark") as visit:
        page = visit.page
        page.goto(f"{served.url}notebooks/03_tiled_attention.html")
        theme = "document.documentElement.dataset.theme"
        assert page.evaluate(theme) == "dark"
        page.emulate_media(media="print")
        page.wait_for_function(f"{theme} == 'light'")
        assert page.locator("#pst-primary-sidebar").is_hidden()
        page.emulate_media(media="screen")
        page.wait_for_function(f"{theme} == 'dark'")


@pytest.mark.browser
def test_the_moving_picture_can_be_stopped(served, browser):
    running = """document.getAnimations().some(
        a => a.playState == 'running' && a.effect.target.closest('.moving svg'))"""
    with Visit(browser, reduced_motion="no-preference") as visit:
        page = visit.page
        page.goto(f"{served.url}index.html")
        assert page.evaluate(running)
        page.get_by_role("button", name="Pause").press("Enter")
        page.wait_for_function(f"!({running})")
        page.get_by_role("button", name="Go on").press("Enter")
        page.wait_for_function(running)
    with Visit(browser, reduced_motion="reduce") as visit:
        visit.page.goto(f"{served.url}index.html")
        assert not visit.page.evaluate(running)
        assert visit.page.get_by_role("button", name="Pause").count() == 0


# ---------------------------------------------------------------- explorers

CONF = """
import sys, types
sys.path[:0] = [{site!r}, {root!r}]

def frames():
    for N in (64, 1024, 256, 128):
        for mask in ("none", "causal"):
            if (N, mask) != (1024, "causal"):
                alt = f"A bar for N = {{N:,}}, mask {{mask}}, and nothing else."
                yield {{"N": N, "mask": mask}}, f'<svg role="img" aria-label="{{alt}}"></svg>', alt

module = types.ModuleType("attention_lib.show.explorers")
module.FRAMES = {{"bar": lambda: list(frames())}}
sys.modules[module.__name__] = module
extensions = ["myst_nb", "course_site"]
html_math_renderer = "mathml"
html_static_path = [{site!r} + "/_static"]
html_baseurl = "/"
"""
INDEX = """# Explorers

```{explorer} bar
The still.
```

```{explorer} none-yet
Another still.
```
"""


@pytest.mark.browser
def test_every_explorer_moves(served, browser):
    """With the library's own frames: every control leads to another one, most to another picture.

    (A control may be without effect: some masks have no size.)
    """
    changed = "([box, was]) => box.dataset.state != was"
    with Visit(browser) as visit:
        page = visit.page
        page.goto(f"{served.url}explorers.html")
        boxes = page.locator(".frames").all()
        assert {box.get_attribute("data-frames") for box in boxes} == set(FRAMES)
        for box in boxes:
            picture, seen = box.locator(".frames-picture"), set()
            controls = box.locator("[data-control]").all()
            for control in controls:
                was = box.get_attribute("data-state")
                first = control.input_value() == "0"
                if control.get_attribute("type") == "range":  # a slider grows upward
                    control.press("ArrowRight" if first else "ArrowLeft")
                else:  # a list downward
                    control.press("ArrowDown" if first else "ArrowUp")
                page.wait_for_function(changed, arg=[box.element_handle(), was])
                seen.add((picture.inner_html(), box.locator(".frames-words").inner_text()))
            assert len(seen) >= max(2, len(controls) - 1), box.get_attribute("data-frames")
        assert not visit.foreign and not visit.errors


@pytest.fixture(scope="module")
def explorers(tmp_path_factory):
    """A page with an explorer of seven frames (a grid with a hole), and one that has none yet."""
    source = tmp_path_factory.mktemp("explorers")
    conf = CONF.format(site=str(ROOT / "site"), root=str(ROOT))
    (source / "conf.py").write_text(conf, encoding="utf-8")
    (source / "index.md").write_text(INDEX + "\n```{toctree}\nnb\n```\n", encoding="utf-8")
    cell = nbformat.v4.new_code_cell("show()", execution_count=1)
    html = '<div data-explorer="bar">the still</div>'
    cell.outputs = [nbformat.v4.new_output("display_data", {"text/html": html})]
    title = nbformat.v4.new_markdown_cell("# A notebook")
    nb = nbformat.v4.new_notebook(cells=[title, cell])
    nb.metadata["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}
    nbformat.write(nb, source / "nb.ipynb")
    run(["-m", "sphinx", "-W", "-q", "-D", "nb_execution_mode=off", source, source / "out"])
    return source / "out"


def test_without_frames_the_still_stays(explorers):
    page = Page(explorers / "index.html")
    assert "Another still." in page.text and "The still." not in page.text
    assert not page.errors
    picture = page.tree.find(".//div[@class='frames-picture']/")
    assert "N = 64, mask none" in picture.get("aria-label")


def test_an_output_marked_as_an_explorer_becomes_one(explorers):
    page = Page(explorers / "nb.html")
    assert 'data-frames="bar"' in page.text and "the still" not in page.text


@pytest.mark.browser
@pytest.mark.parametrize("by", ["a server", "the folder"])
def test_an_explorer_is_driven_by_keys(explorers, browser, axe, by):
    """Also from a folder, without any server: the frames come as a script."""
    with Visit(browser) as visit:
        page = visit.page
        server = Server(explorers)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page.goto(
            f"{server.url}index.html" if by == "a server" else f"file://{explorers}/index.html"
        )
        slider, choice = page.get_by_role("slider", name="N"), page.get_by_role("combobox")
        picture, said = page.locator(".frames-picture svg"), page.get_by_role("status")
        assert page.evaluate("document.scripts.length") == page.locator("script").count()
        assert "frames/bar.js" not in page.content().replace('data-src="_static/frames/bar.js"', "")
        slider.focus()
        page.keyboard.press("ArrowRight")
        page.get_by_text("N = 128, mask none").wait_for()
        assert "N = 128, mask none" in picture.get_attribute("aria-label")
        assert said.inner_text() == picture.get_attribute("aria-label")
        page.keyboard.press("Tab")
        page.keyboard.press("c")  # the list's entry that begins so
        page.get_by_text("N = 128, mask causal").wait_for(state="attached")
        assert choice.input_value() == "1"
        slider.focus()
        page.keyboard.press("End")  # no frame has 1,024 and causal: the control that moved wins
        page.get_by_text("N = 1,024, mask none").wait_for(state="attached")
        assert choice.input_value() == "0" and slider.get_attribute("aria-valuetext") == "1,024"
        page.evaluate(axe)
        assert not [x for x in faults(page) if "frames" in x or "label" in x]
        assert not visit.foreign and not visit.errors
        server.shutdown()
        server.server_close()


@pytest.mark.browser
def test_without_scripts_an_explorer_is_a_picture(explorers, browser):
    with Visit(browser, java_script_enabled=False) as visit:
        visit.page.goto(f"file://{explorers}/index.html")
        assert visit.page.locator(".frames-picture svg").count() == 1
        assert visit.page.locator(".frames-controls").is_hidden()
