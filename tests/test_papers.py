"""What the papers measured: the file is well formed, the numbers are the papers', and they add up.

The literals here were written down by others, from the papers, before the file was made.
"""

import re
from importlib import resources

import pytest

from attention_lib.hardware import GPUS
from attention_lib.papers import Source, model_flops, parse, table, tables
from attention_lib.show import papers as picture

GOOD = """
[sources.A]
paper = "A"
arxiv = "2205.14135"
version = "v2"
url = "https://arxiv.org/abs/2205.14135v2"
known_by = "its date"
[[tables]]
id = "one"
source = "A"
where = "Table 1"
read = "text"
what = "a thing"
columns = { ms = "ms", 128 = "GB" }
rows = [["x", 1.5, "-"], ["y", 2, 3]]
"""


@pytest.mark.parametrize("id", tables())
def test_every_row_says_where_it_is_from(id):
    t = table(id)
    assert t.rows and t.read in ("text", "bars") and all(t.columns.values())
    for row in t.rows:
        assert row.source.version and row.where and row.source.url.startswith("https://")
        assert set(row.values) == set(t.columns)
        assert all(v is None or v > 0 for v in row.values.values())
    assert t.source.version in t.cite() and t.where in t.cite() and t.source.url in t.cite()


def test_what_the_paper_says_of_models():
    gpt2 = table("gpt2")
    assert list(gpt2.column("days").values()) == [9.5, 4.7, 2.7, 21.0, 11.5, 6.9]
    assert table("bert").row("FlashAttention") == {"minutes": 17.4, "spread": 1.4}
    assert table("bert").row("NVIDIA, MLPerf 1.1") == {"minutes": 20.0, "spread": 1.5}
    lra = table("lra")
    assert (lra.value("FlashAttention", "Avg"), lra.value("FlashAttention", "speedup")) == (
        59.8,
        2.4,
    )
    assert lra.value("Block-sparse FlashAttention", "speedup") == 2.8
    assert lra.value("Linear Attention", "Avg") == 59.6
    context = table("context")
    assert context.value("FlashAttention, 4k", "perplexity") == 17.5
    assert context.value("FlashAttention, 4k", "days") == 3.6


def test_what_the_proceedings_print_instead():
    context, figure = table("context (NeurIPS)"), table("figure 2 (NeurIPS)")
    assert context.value("FlashAttention, 2k", "perplexity") == 17.7
    assert context.value("FlashAttention, 4k", "perplexity") == 17.2
    assert (figure.value("standard", "gb"), figure.value("standard", "ms")) == (35.3, 35.1)
    assert figure.value("FlashAttention", "ms") == 11.7
    old = table("figure 2")
    assert old.row("standard") == {"gflop": 66.6, "gb": 40.3, "ms": 41.7}
    assert old.row("FlashAttention") == {"gflop": 75.2, "gb": 4.4, "ms": 7.3}


@pytest.mark.parametrize("later", [id for id in tables() if id.endswith("(NeurIPS)")])
def test_versions_can_be_laid_side_by_side(later):
    first, second = table(later.removesuffix(" (NeurIPS)")), table(later)
    assert [r.label for r in first.rows] == [r.label for r in second.rows]
    assert first.columns == second.columns and first.where == second.where
    assert first.source.arxiv == second.source.arxiv
    assert first.source.version != second.source.version
    assert [r.values for r in first.rows] != [r.values for r in second.rows]


def test_printed_speedups_follow_from_the_days():
    baselines = {"gpt2": "HuggingFace", "context": "Megatron-LM"}
    for id in ("gpt2", "gpt2 (NeurIPS)", "context", "context (NeurIPS)"):
        for row in table(id).rows:
            size = row.label.split(",")[0] if id.startswith("gpt2") else ""
            base = next(
                r for r in table(id).rows if size in r.label and baselines[id.split()[0]] in r.label
            )
            # All three numbers are rounded to one decimal: some values in their intervals agree.
            high, low = base.values["days"], row.values["days"]
            assert (high - 0.05) / (low + 0.05) <= row.values["speedup"] + 0.05
            assert (high + 0.05) / (low - 0.05) >= row.values["speedup"] - 0.05


def test_the_means_of_long_range_arena():
    for row in table("lra").rows:
        *tasks, mean = [v for c, v in row.values.items() if c != "speedup"]
        assert len(tasks) == 5 and abs(sum(tasks) / 5 - mean) <= 0.1 + 1e-9


def test_memory_is_rebuilt():
    standard = [36, 104, 336, 1184, 4416, 17024]
    tiled = [22, 44, 104, 209, 418, 836, 1672, 3344, 6688, 13376]
    memory = table("memory")
    assert list(memory.series("PyTorch").values()) == standard
    assert list(memory.series("FlashAttention").values()) == tiled
    for N, printed in memory.series("FlashAttention").items():
        arrays = 11 if N <= 256 else 13
        assert abs(128 * (2 * arrays * N * 64 + 8 * N) / 2**20 - printed) <= 0.5


def test_rates_follow_from_times():
    for row in table("ablation").rows:
        flop = 4 * 8448**2 * 128 * 16 * 4
        assert round(flop / row.values["ms"] / 1e9) == row.values["tflops"]
    # FlashAttention-2 says that the first one stays below 40% of the peak. 14 N^2 d, 128 heads.
    for id in ("time, plain", "time, masked"):
        for N, ms in table(id).series("FlashAttention").items():
            assert 14 * N**2 * 64 * 128 / (ms * 1e-3) < 0.4 * GPUS["A100-40"].tensor_flops


def test_training_table_and_headlines():
    rows = [[r.values[c] for c in ("none", "FA", "FA2")] for r in table("training").rows]
    assert rows == [[142, 189, 196], [72, 170, 220], [149, 189, 205], [80, 175, 225]]
    a100, h100 = GPUS["A100-80"].tensor_flops, GPUS["H100"].tensor_flops
    assert round(100 * 225e12 / a100) == 72
    assert table("fa2 best").value("forward, A100", "tflops") == 230
    assert table("fa3 best").value("16 bits", "tflops") == 740
    for id in ("fa3 best", "fa3 best (NeurIPS)"):
        best = table(id).row("16 bits")
        assert round(100 * best["tflops"] * 1e12 / h100) == best["share"]
    assert table("error").value("FlashAttention-3, 8 bits", "rmse") == 9.1e-3


def test_figures_agree_with_the_texts_beside_them():
    # FlashAttention-2: 50 to 73% of the peak, the first one 25 to 40%, both on an A100.
    for id in ("fa2, d = 64", "fa2, d = 128"):
        series = {r.label: table(id).series(r.label).values() for r in table(id).rows}
        assert 0.48 < min(series["FlashAttention-2"]) / 312
        assert max(series["FlashAttention-2"]) / 312 < 0.73
        assert 0.22 < min(series["FlashAttention"]) / 312
        assert max(series["FlashAttention"]) / 312 < 0.4
    # A mask never raises a rate that counts half; FlashAttention-3 is 1.5 to 2 times its elder.
    for full in ("fa2, d = 64", "fa2, d = 128", "fa3, d = 128"):
        half = table(f"{full}, causal")
        for row in table(full).rows:
            assert all(half.value(row.label, n) <= v for n, v in row.values.items() if v)
    for id in ("fa3, d = 128", "fa3, d = 128, causal"):
        old, new = table(id).series("FlashAttention-2"), table(id).series("FlashAttention-3")
        assert all(1.5 < new[n] / old[n] < 2.05 for n in old)


def test_shares_are_shares():
    rows = picture.shares()
    assert len(rows) == len(picture.SHARES)
    assert all(0 < share < 1 for _, shares in rows.values() for share in shares)
    assert [len(s) for _, s in rows.values()] == [5, 5, 5, 1, 4, 4, 4, 1, 1, 1, 1]


def test_model_flops():
    assert model_flops(10, 2, 3, 5) == (60, 12 * 2 * 3 * 5)
    assert model_flops(10, 2, 3, 5, attention=0.5) == (60, 180)
    dense, attention = model_flops(**table("sizes").row("GPT3-2.7B"), context=8192)
    assert attention / (dense + attention) == pytest.approx(0.332, abs=0.001)
    for name in ("parameters", "layers", "width", "context"):
        sizes = dict(parameters=10, layers=2, width=3, context=5) | {name: 0}
        with pytest.raises(ValueError, match=f"{name} is 0; accepted: a number above 0"):
            model_flops(**sizes)


def test_reading():
    one = parse(GOOD)["one"]
    assert one.value("x", 128) is None and one.value("y", "128") == 3
    assert one.column("ms") == {"x": 1.5, "y": 2} and one.column(128) == {"y": 3}
    assert str(one) == "A v2, Table 1"
    assert one.cite() == "[A v2, Table 1](https://arxiv.org/abs/2205.14135v2)"
    with pytest.raises(ValueError, match="label is 'z'; accepted in 'one': 'x', 'y'"):
        one.row("z")
    with pytest.raises(ValueError, match="column is 's'; accepted in 'one': ms, 128"):
        one.value("x", "s")
    with pytest.raises(ValueError, match="id is 'nothing'; accepted: 'bert'"):
        table("nothing")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('version = "v2"\n', "", "sources.A has .* accepted: exactly"),
        ('version = "v2"', 'version = " "', "version is ' '"),
        ('version = "v2"', 'version = "v1"', "not version 'v1'"),
        ('url = "https', 'url = "http', "url is 'http:"),
        ('arxiv = "2205.14135"', 'arxiv = "FlashAttention"', "arxiv is 'FlashAttention'"),
        ('known_by = "its date"', 'known_by = ""', "known_by is ''"),
        ('source = "A"', 'source = "B"', "source is 'B'; accepted: A"),
        ('where = "Table 1"', 'where = ""', "where is ''"),
        ('where = "Table 1"\n', "", "table 'one' has"),
        ('read = "text"', 'read = "memory"', "read is 'memory'; accepted: text, bars"),
        ('ms = "ms"', 'ms = ""', "unit of column ms is ''"),
        ('["y", 2, 3]', '["y", 2]', "row 'y': 1 values for 2 columns"),
        ('["y", 2, 3]', '["x", 2, 3]', "two rows have the label 'x'"),
        ('["y", 2, 3]', '["y", "2", 3]', "row 'y': a value is '2'"),
        ('["y", 2, 3]', '["y", nan, 3]', "row 'y': a value is nan"),
        ('["y", 2, 3]', '["y", 0, 3]', "row 'y': a value is 0"),
        ('["y", 2, 3]', '["y", true, 3]', "row 'y': a value is True"),
    ],
)
def test_a_file_with_a_hole_is_refused(old, new, says):
    assert GOOD.count(old) == 1
    with pytest.raises(ValueError, match=says):
        parse(GOOD.replace(old, new))


def test_two_tables_with_one_id_and_a_source_without_table_are_refused():
    again = GOOD[GOOD.index("[[tables]]") :]
    with pytest.raises(ValueError, match="two tables have the id 'one'"):
        parse(GOOD + again)
    with pytest.raises(ValueError, match="no table is from A"):
        parse(GOOD[: GOOD.index("[[tables]]")])


def test_the_file_is_small_and_every_source_is_dated():
    text = resources.files("attention_lib.data").joinpath("papers.toml").read_text("utf-8")
    assert len(text) < 20_000 and not re.search(r"[!\U0001f300-\U0001faff]", text)
    for source in {table(id).source for id in tables()}:
        assert isinstance(source, Source)
        assert re.fullmatch(r"v\d+|NeurIPS 20\d\d|commit [0-9a-f]{7}, .*20\d\d", source.version)
