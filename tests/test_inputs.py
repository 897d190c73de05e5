"""Broken input to every public function: the error names the argument, what came, what is meant."""

import inspect

import ml_dtypes
import numpy as np
import pytest

import attention_lib
from attention_lib import checks, data, online, show, traffic
from tests import test_backward, test_hardware, test_sparse

A, B = np.zeros((6, 4)), np.zeros((8, 4))
ENTRIES = {
    "standard_attention": (attention_lib.standard_attention, ()),
    "unfused_attention": (attention_lib.unfused_attention, (4,)),
    "flash_attention": (attention_lib.flash_attention, (4, 4)),
    "flash_attention_q_outer": (attention_lib.flash_attention_q_outer, (4, 4)),
}

# What is put in for (Q, K, V), the options, the error, and what its message must hold.
ATTENTION = [
    (([[1.0]], B, B), {}, TypeError, "Q must be a numpy array, got list"),
    ((A, None, B), {}, TypeError, "K must be a numpy array, got NoneType"),
    ((A.astype(int), B, B), {}, TypeError, "Q has dtype int64; accepted: float16, bfloat16"),
    ((A.astype(complex), B, B), {}, TypeError, "Q has dtype complex128"),
    ((A.astype(object), B, B), {}, TypeError, "Q has dtype object"),
    ((A, B.astype(np.float32), B), {}, TypeError, "K has dtype float32 but Q has float64"),
    ((A, B, B.astype(np.float16)), {}, TypeError, "V has dtype float16 but Q has float64"),
    ((A[0], B, B), {}, ValueError, r"Q has shape \(4,\); accepted: at least 2 axes"),
    ((A[:, :0], B[:, :0], B[:, :0]), {}, ValueError, "d is 0"),
    ((A, B[:, :3], B), {}, ValueError, r"K has shape \(8, 3\); accepted: last axis d = 4"),
    ((A, B, B[:7]), {}, ValueError, r"V has shape \(7, 4\); accepted: the shape of K"),
    ((A[None], B, B), {}, ValueError, "K has shape .*; accepted: the leading axes of Q"),
    ((np.stack([A] * 3), np.stack([B] * 2), np.stack([B] * 2)), {}, ValueError, "K has 2 heads"),
    ((A[None][:0], B[None], B[None]), {}, ValueError, r"Q has shape \(0, 6, 4\)"),
    (
        (np.where(A == 0, np.nan, A), B, B),
        {},
        ValueError,
        "Q has NaN or infinity; accepted: finite",
    ),
    ((A, B, B + np.inf), {}, ValueError, "V has NaN or infinity"),
    ((np.ma.array(A), B, B), {}, TypeError, "Q must be a numpy array, got MaskedArray"),
    ((A, B.view(np.matrix), B), {}, TypeError, "K must be a numpy array, got matrix"),
    (
        (A.astype(np.float16), B.astype(ml_dtypes.bfloat16), B),
        {},
        TypeError,
        "K has dtype bfloat16",
    ),
    ((A.astype(np.longdouble), B, B), {}, TypeError, "Q has dtype"),
    (
        (np.zeros((2, 4, 6, 4)), np.zeros((3, 4, 8, 4)), np.zeros((3, 4, 8, 4))),
        {},
        ValueError,
        "K has",
    ),
    (
        (np.zeros((4, 6, 4)), np.zeros((0, 8, 4)), np.zeros((0, 8, 4))),
        {},
        ValueError,
        "K has 0 heads",
    ),
    ((A, B, B), {"align": ["lower-right"]}, ValueError, "align is"),
    ((A, B, B), {"mask": np.full((6, 8), 1e39)}, None, ""),
    (
        (A, B, B),
        {"mask": np.ma.array(np.ones((6, 8), bool))},
        TypeError,
        "mask must be a numpy array",
    ),
    ((A, B, B), {"mask": np.zeros((6, 8), np.longdouble)}, TypeError, "mask has dtype"),
    ((A, B, B), {"causal": "yes"}, TypeError, "causal must be True or False, got str 'yes'"),
    ((A, B, B), {"causal": 1}, TypeError, "causal must be True or False, got int 1"),
    ((A, B, B), {"align": "left"}, ValueError, "align is 'left'; accepted: 'lower-right'"),
    ((A, B, B), {"mask": [[True]]}, TypeError, "mask must be a numpy array, got list"),
    ((A, B, B), {"mask": np.ones((6, 8), int)}, TypeError, "mask has dtype int64; accepted: bool"),
    ((A, B, B), {"mask": np.ones((8, 6), bool)}, ValueError, r"mask has shape \(8, 6\).*\(6, 8\)"),
    ((A, B, B), {"mask": np.ones((2, 6, 8), bool)}, ValueError, "mask has shape"),
    ((A, B, B), {"mask": np.full((6, 8), np.nan)}, ValueError, "mask has NaN, .inf or more"),
    ((A, B, B), {"mask": np.full((6, 8), np.inf)}, ValueError, "mask has NaN, .inf or more"),
    ((A, B, B), {"hbm": {}}, TypeError, "hbm must be an HBM or None, got dict"),
]
BLOCKS = [
    ((0, 4), ValueError, "Br is 0; accepted: 1 or more"),
    ((4, -1), ValueError, "Bc is -1; accepted: 1 or more"),
    ((4.0, 4), TypeError, "Br must be an int, got float 4.0"),
    ((4, "4"), TypeError, "Bc must be an int, got str '4'"),
    ((True, 4), TypeError, "Br must be an int, got bool True"),
    ((None, 4), TypeError, "Br must be an int, got NoneType"),
    ((np.array([4, 4]), 4), TypeError, "Br must be an int, got ndarray"),
]


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("qkv, options, kind, message", ATTENTION)
def test_attention_refuses(name, qkv, options, kind, message):
    function, blocks = ENTRIES[name]
    if "hbm" in options and "hbm" not in inspect.signature(function).parameters:
        message = "hbm"  # an argument that standard_attention does not have
    if kind is None:  # accepted here, refused where it is too large for the arithmetic
        function(*qkv, *blocks, **options)
        qkv, kind = [x.astype(np.float32) for x in qkv], ValueError
        message = "mask has NaN, .inf or more than 3.4e"
    with pytest.raises(kind, match=message):
        function(*qkv, *blocks, **options)


def test_an_argument_that_is_missing_or_unknown_names_the_function():
    with pytest.raises(TypeError, match=r"flash_attention\(\) got wrong arguments: .*'Bc'"):
        attention_lib.flash_attention(A, B, B, 4)
    with pytest.raises(TypeError, match=r"standard_attention\(\) got wrong arguments: .*'heads'"):
        attention_lib.standard_attention(A, B, B, heads=4)


@pytest.mark.parametrize("blocks, kind, message", BLOCKS)
@pytest.mark.parametrize("name", ["flash_attention", "flash_attention_q_outer"])
def test_blocks_refused(name, blocks, kind, message):
    with pytest.raises(kind, match=message):
        ENTRIES[name][0](A, B, B, *blocks)


S = np.zeros((3, 5))
STATE = online.start(3, 2)
OTHERS = [
    (lambda: attention_lib.softmax([1.0]), TypeError, "x must be a numpy array, got list"),
    (lambda: attention_lib.softmax(np.arange(3)), TypeError, "x has dtype int64"),
    (lambda: attention_lib.softmax(np.float64(1.0)), TypeError, "x must be a numpy array"),
    (lambda: attention_lib.softmax(S, axis=2), ValueError, "axis is 2; accepted: -2 to 1"),
    (lambda: attention_lib.softmax(S, axis="0"), TypeError, "axis must be an int, got str '0'"),
    (lambda: attention_lib.block_sizes(0, 64), ValueError, "M is 0; accepted: 1 or more"),
    (lambda: attention_lib.block_sizes(100, 6.4), TypeError, "d must be an int, got float 6.4"),
    (lambda: attention_lib.HBM(budget=0), ValueError, "budget is 0; accepted: 1 or more"),
    (lambda: attention_lib.HBM(budget="4k"), TypeError, "budget must be an int, got str '4k'"),
    (lambda: attention_lib.HBM().tensor("A", [1]), TypeError, "A must be a numpy array, got list"),
    (lambda: online.start(-1, 4), ValueError, "rows is -1; accepted: 0 or more"),
    (lambda: online.start(3, 4, int), TypeError, "dtype is 'int'; accepted: float32"),
    (lambda: online.update((1, 2, 3), S, S), TypeError, "state must be a State .*got tuple"),
    (lambda: online.update(STATE, S[:2], S.T), ValueError, r"S has shape \(2, 5\)"),
    (lambda: online.update(STATE, S, S), ValueError, r"V has shape \(3, 5\); accepted: 5 rows"),
    (lambda: online.update(STATE, S, S[:, :2].T), ValueError, "V has shape"),
    (
        lambda: online.update(STATE, S, np.zeros((5, 2)), overwrite=1),
        TypeError,
        "overwrite must be",
    ),
    (lambda: online.merge(STATE, None), TypeError, "b must be a State"),
    (lambda: online.merge(STATE, online.start(4, 2)), ValueError, r"b has O of shape \(4, 2\)"),
    (lambda: online.finish(S), TypeError, "state must be a State"),
    (lambda: online.finish(online.State(1, 2, 3)), ValueError, "state has parts that do not fit"),
    (lambda: online.start(3, 2, np.float16), TypeError, "accepted: float32 or float64"),
    (lambda: online.start(3, 2, "zzz"), TypeError, "dtype is 'zzz'"),
    (
        lambda: online.update(online.start(3, 2, np.float32), S, S.T[:, :2]),
        TypeError,
        "S has dtype float64; accepted: float32, the dtype of state.O",
    ),
    (
        lambda: online.merge(STATE, online.start(3, 2, np.float32)),
        TypeError,
        "b has dtype float32; accepted: float64",
    ),
    (lambda: online.update(STATE, S.astype(int), S.T[:, :2]), TypeError, "S has dtype int64"),
    (lambda: online.merge(STATE, online.start(3, 4)), ValueError, r"b has O of shape \(3, 4\)"),
    (lambda: attention_lib.HBM().tensor("A", S).store(S.T), ValueError, r"tile for A has shape"),
    (
        lambda: attention_lib.HBM().tensor("A", S).store([1]),
        TypeError,
        "tile for A must be a numpy",
    ),
    (lambda: traffic.standard_traffic(-1, 64), ValueError, "N is -1; accepted: 0 or more"),
    (
        lambda: traffic.standard_traffic(8, 64, Nk=1.5),
        TypeError,
        "Nk must be an int, got float 1.5",
    ),
    (lambda: traffic.flash_traffic(8, 0, 4, 4), ValueError, "d is 0; accepted: 1 or more"),
    (lambda: traffic.flash_traffic(8, 4, 4, 4, causal=1), TypeError, "causal must be True or"),
    (lambda: traffic.q_outer_traffic(8, 4, 0, 4), ValueError, "Br is 0"),
    (lambda: traffic.q_outer_traffic(8, 4, 4, 4, align="x"), ValueError, "align is 'x'"),
    (lambda: traffic.tile_elements(4, 4, 0), ValueError, "d is 0"),
    (lambda: traffic.attention_memory(8, 4, 1, method="fast"), ValueError, "method is 'fast'"),
    (lambda: traffic.attention_memory(8, 4, 1, method="flash", rule="old"), ValueError, "rule is"),
    (lambda: traffic.largest_context(0, 4, 1, method="flash"), ValueError, "budget is 0"),
    (lambda: traffic.layer_traffic(8, 4, 0, method="flash"), ValueError, "heads is 0"),
    (lambda: traffic.layer_traffic(8, 4, 1, method="flash", Br=0), ValueError, "Br is 0"),
    (lambda: traffic.arithmetic_intensity(8, 4, 4, rule=None), ValueError, "rule is None"),
    (lambda: traffic.arithmetic_intensity(0, 4, 4), ValueError, "N is 0; accepted: 1 or more"),
    (lambda: checks.check("nothing", 1), ValueError, "exercise_id is 'nothing'; accepted:"),
    (lambda: checks.ask(None), ValueError, "exercise_id is None; accepted:"),
    (lambda: data.real_qkv(layer=99), ValueError, "layer"),
    (lambda: show.figure(None, alt="short"), ValueError, "alt is 'short'; accepted: a sentence"),
    (lambda: show.show_source(3), TypeError, "function must be a Python function, got int"),
]


@pytest.mark.parametrize("call, kind, message", OTHERS)
def test_the_others_refuse(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_every_public_function_is_in_a_table():
    here = inspect.getsource(inspect.getmodule(test_the_others_refuse))
    elsewhere = inspect.getsource(test_hardware).replace("hw.", "")
    elsewhere += inspect.getsource(test_backward) + inspect.getsource(test_sparse)
    for name in attention_lib.__all__:
        if inspect.isfunction(getattr(attention_lib, name)):
            assert f"{name}(" in here or f'"{name}"' in here or f"{name}(" in elsewhere, name


def test_numpy_integers_and_every_float_are_accepted():
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64):
        x = np.ones((3, 2), dtype)
        O, *_ = attention_lib.flash_attention(x, x, x, np.int64(2), np.int32(2), causal=np.True_)
        assert O.dtype == x.dtype and (O == 1).all()
