"""What the papers measured, as data: each number with its paper, version, place and unit.

    table("gpt2").value("small, FlashAttention", "days")     2.7
    table("gpt2").cite()                                     a Markdown link to paper and table

The numbers are in data/papers.toml, as printed. Nothing here was measured by this course. A file in
which a number lacks its source, version or unit is refused when it is read.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import isfinite
from numbers import Real

READ = ("text", "bars")  # a table or sentence; the numbers printed on the bars of a figure
NOTHING = "-"


@dataclass(frozen=True)
class Source:
    """One text in one version. known_by: how the copy that was read was told from other versions.

    ValueError without a version, or with a link that leads to another version on arXiv.
    """

    id: str
    paper: str
    arxiv: str
    version: str
    url: str
    known_by: str

    def __post_init__(self):
        for name in ("paper", "version", "url", "known_by"):
            _text(f"sources.{self.id}: {name}", getattr(self, name))
        if not self.url.startswith("https://"):
            raise ValueError(f"sources.{self.id}: url is {self.url!r}; accepted: https://...")
        if self.arxiv and not re.fullmatch(r"\d{4}\.\d{5}", self.arxiv):
            raise ValueError(f"sources.{self.id}: arxiv is {self.arxiv!r}; accepted: 2205.14135")
        if "arxiv.org" in self.url and not self.url.endswith(f"/{self.arxiv}{self.version}"):
            raise ValueError(
                f"sources.{self.id}: url {self.url} is not version {self.version!r} of {self.arxiv}"
            )


@dataclass(frozen=True)
class Row:
    """One row: its label, and column -> number, or None where the paper has nothing to print."""

    label: str
    values: Mapping[str, float | None]
    source: Source
    where: str


@dataclass(frozen=True)
class Table:
    """Rows from one place of one source. columns: name -> unit. read: how, one of READ."""

    id: str
    source: Source
    where: str
    read: str
    what: str
    columns: Mapping[str, str]
    rows: tuple[Row, ...]

    def row(self, label):
        """column -> number. ValueError for a label that is not there."""
        for row in self.rows:
            if row.label == label:
                return dict(row.values)
        known = ", ".join(repr(row.label) for row in self.rows)
        raise ValueError(f"label is {label!r}; accepted in {self.id!r}: {known}")

    def value(self, label, column):
        """The number, or None where the paper has nothing to print."""
        return self.row(label)[self._column(column)]

    def column(self, column):
        """label -> number, without the rows that have none."""
        name = self._column(column)
        return {r.label: r.values[name] for r in self.rows if r.values[name] is not None}

    def series(self, label):
        """int(column) -> number, without gaps: for tables whose columns are lengths."""
        return {int(c): v for c, v in self.row(label).items() if v is not None}

    def _column(self, column):
        if str(column) not in self.columns:
            raise ValueError(
                f"column is {column!r}; accepted in {self.id!r}: {', '.join(self.columns)}"
            )
        return str(column)

    def __str__(self):
        return f"{self.source.paper} {self.source.version}, {self.where}"

    def cite(self):
        """The same as a Markdown link."""
        return f"[{self}]({self.source.url})"


def table(id):
    """The Table with this id. Raises ValueError for one that is not there."""
    if id not in _file():
        raise ValueError(f"id is {id!r}; accepted: {', '.join(map(repr, _file()))}")
    return _file()[id]


def tables():
    """The ids of all tables, in the order of the file."""
    return list(_file())


def model_flops(parameters, layers, width, context, *, attention=1.0):
    """FLOP of training one token, in two parts: products with weights, and attention.

    6 * parameters, and 12 * layers * width * context, as FlashAttention-2 (arXiv 2307.08691v1),
    section 4.2 counts them, after Megatron-LM. The second part counts all N keys for each query;
    attention=0.5 counts the half that a causal mask leaves. ValueError for sizes not above 0.
    """
    sizes = dict(parameters=parameters, layers=layers, width=width, context=context)
    for name, value in sizes.items():
        _above_zero(name, value)
    return 6 * parameters, attention * 12 * layers * width * context


@cache
def _file():
    text = resources.files("attention_lib.data").joinpath("papers.toml").read_text(encoding="utf-8")
    return parse(text)


def parse(text):
    """id -> Table from the text of a TOML file in the form of data/papers.toml.

    Raises ValueError that names the table and what is missing or wrong in it.
    """
    data = tomllib.loads(text)
    sources = {}
    for id, fields in data.get("sources", {}).items():
        _keys(f"sources.{id}", fields, ("paper", "arxiv", "version", "url", "known_by"))
        sources[id] = Source(id, **fields)
    found = {}
    for fields in data.get("tables", []):
        one = _table(fields, sources)
        if one.id in found:
            raise ValueError(f"two tables have the id {one.id!r}")
        found[one.id] = one
    unused = set(sources) - {one.source.id for one in found.values()}
    if unused:
        raise ValueError(f"no table is from {', '.join(sorted(unused))}")
    return found


def _table(fields, sources):
    name = f"table {fields.get('id')!r}"
    _keys(name, fields, ("id", "source", "where", "read", "what", "columns", "rows"))
    for key in ("id", "where", "what"):
        _text(f"{name}: {key}", fields[key])
    if fields["source"] not in sources:
        raise ValueError(f"{name}: source is {fields['source']!r}; accepted: {', '.join(sources)}")
    if fields["read"] not in READ:
        raise ValueError(f"{name}: read is {fields['read']!r}; accepted: {', '.join(READ)}")
    for column, unit in fields["columns"].items():
        _text(f"{name}: unit of column {column}", unit)
    source, rows = sources[fields["source"]], []
    for label, *values in fields["rows"]:
        _text(f"{name}: label of a row", label)
        if label in [row.label for row in rows]:
            raise ValueError(f"{name}: two rows have the label {label!r}")
        if len(values) != len(fields["columns"]):
            raise ValueError(
                f"{name}, row {label!r}: {len(values)} values for {len(fields['columns'])} columns"
            )
        place = f"{name}, row {label!r}: a value"
        numbers = [
            None if v == NOTHING else _above_zero(place, v, f", or {NOTHING!r}") for v in values
        ]
        cells = dict(zip(fields["columns"], numbers, strict=True))
        rows.append(Row(label, cells, source, fields["where"]))
    return Table(**(fields | dict(source=source, rows=tuple(rows))))


def _keys(name, fields, wanted):
    if set(fields) != set(wanted):
        raise ValueError(f"{name} has {sorted(fields)}; accepted: exactly {sorted(wanted)}")


def _text(name, value):
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} is {value!r}; accepted: a text that is not empty")


def _above_zero(name, value, or_else=""):
    if isinstance(value, bool) or not isinstance(value, Real) or not isfinite(value) or value <= 0:
        raise ValueError(f"{name} is {value!r}; accepted: a number above 0{or_else}")
    return value
