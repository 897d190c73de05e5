"""Exercises 13 to 17: kernels as text, judged on the stand-in; and tiles for a shared memory.

The kernels here are written from the tasks alone, in another style than the registry's, which are
edits of the given text.
"""

import os
import subprocess
import sys

import numpy as np
import pytest

from attention_lib import gpu
from attention_lib.checks import _QUESTIONS, check, cuda
from attention_lib.checks.cuda import Kernel, check_kernel, on_standin
from attention_lib.checks.exercises import ex13, ex14, ex15, ex16, ex17
from attention_lib.checks.programs import check_program, fails_on
from attention_lib.gpu import broken, ladder, nvrtc, own
from attention_lib.gpu.broken import edited, source

# A kernel takes a hundred times as long on the stand-in as a numpy program.
SEEDS = range(0, int(os.environ.get("COURSE_SEEDS", "40")), 20)
KERNELS = {id: q for id, q in _QUESTIONS.items() if isinstance(q, Kernel)}


def made(text, *changes):
    """The text with (old, new) replaced; each old must be there once."""
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


# ------------------------------------------------------------------ 13: barriers

LSE = """
extern "C" __global__ void row_lse(const float *Q, const float *K, float *L, int Nq, int Nk) {
    __shared__ float Kj[3][2];
    __shared__ float S[4][3];
    const int first = blockIdx.x * 4;
    const int me = threadIdx.x, all = blockDim.x;
    float top = -INFINITY, sum = 0;
    int j0 = 0;
    while (j0 < Nk) {
        // start
        for (int j = me; j < 3; j += all) {
            Kj[j][0] = (j0 + j < Nk) ? K[(j0 + j) * 2] : 0;
            Kj[j][1] = (j0 + j < Nk) ? K[(j0 + j) * 2 + 1] : 0;
            /* in the load */
        }
        __syncthreads();
        // before
        for (int x = me; x < 12; x += all) {
            float s = -INFINITY;
            if (first + x / 3 < Nq && j0 + x % 3 < Nk) {
                const float *q = Q + (first + x / 3) * 2;
                s = q[0] * Kj[x % 3][0] + q[1] * Kj[x % 3][1];
            }
            S[x / 3][x % 3] = s;
            // in the loop
        }
        // here
        if (me < 4) {
            // in the branch
            for (int j = 0; j < 3; ++j) {
                float s = S[me][j];
                if (s == -INFINITY) continue;
                float bigger = fmaxf(top, s);
                sum = sum * expf(top - bigger) + expf(s - bigger);
                top = bigger;
            }
        } // else
        // end
        j0 += 3;
    }
    if (me < 4 && first + me < Nq) L[first + me] = top + logf(sum);
}
"""
WAIT = "__syncthreads();"
NO_S = """
extern "C" __global__ void row_lse(const float *Q, const float *K, float *L, int Nq, int Nk) {
    __shared__ float Kj[6];
    int i = blockIdx.x * 4 + threadIdx.x;
    bool mine = threadIdx.x < 4 && i < Nq;
    float m = -INFINITY, l = 0.f;
    for (int j0 = 0; j0 < Nk; j0 += 3) {
        int n = min(3, Nk - j0);
        __syncthreads();
        for (int x = threadIdx.x; x < 2 * n; x += blockDim.x) Kj[x] = K[2 * j0 + x];
        __syncthreads();
        for (int j = 0; mine && j < n; j++) {
            float s = Q[2 * i] * Kj[2 * j] + Q[2 * i + 1] * Kj[2 * j + 1], old = m;
            m = fmaxf(m, s);
            l = l * expf(old - m) + expf(s - m);
        }
    }
    if (mine) L[i] = m + logf(l);
}
"""
ONE_FOR_ALL = """
extern "C" __global__ void row_lse(const float *Q, const float *K, float *L, int Nq, int Nk) {
    int i = blockIdx.x * 4 + threadIdx.x;  // no shared memory at all
    if (threadIdx.x >= 4 || i >= Nq) return;
    float m = -INFINITY;
    for (int j = 0; j < Nk; j++) m = max(m, Q[2 * i] * K[2 * j] + Q[2 * i + 1] * K[2 * j + 1]);
    float l = 0.f;
    for (int j = 0; j < Nk; j++) l += expf(Q[2 * i] * K[2 * j] + Q[2 * i + 1] * K[2 * j + 1] - m);
    L[i] = m + logf(l);
}
"""
BARRIER_RIGHT = [made(LSE, ("// here", WAIT)), NO_S, ONE_FOR_ALL,
                 made(LSE, ("// here", WAIT), ("// start", WAIT), ("// end", WAIT))]  # fmt: skip
BARRIER_WRONG = [
    ("before-the-write", [("// before", WAIT)]),
    ("before-the-write", [("__syncthreads();\n        // before", f"{WAIT} {WAIT} {WAIT}")]),
    ("between-two-tiles", [("// start", WAIT)]),
    ("between-two-tiles", [("// end", WAIT)]),
    ("between-two-tiles", [("// start", WAIT), ("// end", WAIT)]),
    ("not-all-threads-reach-it", [("// in the branch", WAIT)]),
    ("not-all-threads-reach-it", [("// here", "if (me < 4) { __syncthreads(); }")]),
    ("not-all-threads-reach-it", [("// in the loop", WAIT)]),
    ("in-both-branches", [("// in the branch", WAIT), ("// else", f"else {{ {WAIT} }}")]),
    ("moved-not-added", [("__syncthreads();\n        // before", ""), ("// here", WAIT)]),
    ("first-tile-only", [("// here", "if (!j0) __syncthreads();")]),
    ("between-two-tiles", [("// here", "if (Nk - j0 > 3) __syncthreads();")]),
    (None, [("// here", WAIT), ("sum * expf(top - bigger)", "sum")]),
    (None, [("// here", WAIT), ("me < 4 && first + me < Nq", "me < 3 && first + me < Nq")]),
]

# ------------------------------------------------------------------ 14: guards

ATTEND = """
extern "C" __global__ void attention(const float *Q, const float *K, const float *V, float *O,
                                     int Nq, int Nk) {
    __shared__ float Kj[4][2], Vj[4][2];
    int row = threadIdx.x + blockDim.x * blockIdx.x;
    float q0 = 0, q1 = 0, top = -INFINITY, sum = 0, o0 = 0, o1 = 0;
    // top of it
    if (row < Nq) q0 = Q[2 * row], q1 = Q[2 * row + 1];
    for (int start = 0; start < Nk; start += 4) {
        int n = min(4, Nk - start);
        __syncthreads();
        int key = start + threadIdx.x, t = threadIdx.x;
        Kj[t][0] = key < Nk ? K[2 * key] : 0;
        Kj[t][1] = key < Nk ? K[2 * key + 1] : 0;
        Vj[t][0] = key < Nk ? V[2 * key] : 0;
        Vj[t][1] = key < Nk ? V[2 * key + 1] : 0;
        __syncthreads();
        for (int j = 0; j < n; ++j) {
            float s = q0 * Kj[j][0] + q1 * Kj[j][1];
            float bigger = fmaxf(top, s), old = expf(top - bigger), p = expf(s - bigger);
            sum = old * sum + p;
            o0 = old * o0 + p * Vj[j][0];
            o1 = old * o1 + p * Vj[j][1];
            top = bigger;
        }
    }
    if (row < Nq) {
        O[2 * row] = o0 / sum;
        O[2 * row + 1] = o1 / sum;
    }
}
"""
LOADS = "".join(x + "\n" for x in ATTEND.split("\n") if "key < Nk ?" in x)
SCORE = "float s = q0 * Kj[j][0] + q1 * Kj[j][1];"
WHOLE = ("j < n; ++j", "j < 4; ++j")
ROWS = ("if (row < Nq) {", "if (row <= Nq) {")


def loads(old, new):
    return LOADS, LOADS.replace(old, new)


CLAMPED = ("int key = start + threadIdx.x", "int key = min(start + (int)threadIdx.x, Nk - 1)")
EXIT = ("    // top of it", "    if (row >= Nq) return;")
GUARD_RIGHT = [
    ATTEND,
    made(ATTEND, WHOLE, (SCORE, SCORE + " if (start + j >= Nk) s = -INFINITY;")),
    made(ATTEND, loads("key < Nk ?", "1 ?"), CLAMPED),
    made(ATTEND, (LOADS, "        if (key < Nk) {\n" + LOADS.replace("key < Nk ?", "1 ?") + "}\n")),
    made(ATTEND, ("if (row < Nq) {", "if (row >= Nq) return;\n    {")),
]  # fmt: skip
GUARD_WRONG = [
    ("rows-only", [WHOLE, loads("key < Nk ?", "1 ?")]),
    ("rows-only", [loads("key < Nk ?", "1 ?")]),
    ("store-forgotten", [ROWS]),
    ("store-forgotten", [("if (row < Nq) {", "{")]),
    ("k-or-v-only", [loads("key < Nk ? K", "1 ? K")]),
    ("k-or-v-only", [loads("key < Nk ? V", "1 ? V")]),
    ("load-guarded-one-too-far", [loads("key < Nk", "key <= Nk")]),
    ("load-guarded-one-too-far", [loads("key < Nk", "key < Nk + 1"),
                                  ("min(4, Nk - start)", "min(4, Nk - start + 1)")]),
    ("padding-scored-0", [WHOLE]),
    ("padding-scored-0", [("min(4, Nk - start)", "4")]),
    ("score-hidden-one-too-late", [("min(4, Nk - start)", "min(4, Nk - start + 1)")]),
    ("tail-dropped", [("start < Nk; start", "start < Nk - 3; start")]),
    ("tail-dropped", [("start < Nk; start", "start / 4 < Nk / 4; start")]),
    ("returns-early", [EXIT]),
    ("last-key-repeated", [WHOLE, loads("key < Nk ?", "1 ?"), CLAMPED]),
    ("padding-in-the-maximum", [WHOLE, ("p = expf(s - bigger);",
                                        "p = j < n ? expf(s - bigger) : 0;")]),
    ("padding-left-unwritten", [
        (LOADS, "        if (key < Nk) {\n" + LOADS.replace("key < Nk ?", "1 ?") + "}\n"),
        WHOLE, (SCORE, SCORE + " if (start + j >= Nk) s = -INFINITY;")]),
    ("last-row-lost", [("if (row < Nq) {", "if (row + 1 < Nq) {")]),
    ("finite-in-place-of-minus-infinity", [
        WHOLE, (SCORE, SCORE + " if (start + j >= Nk) s = -1e9f;")]),
    (None, [("o1 / sum", "o1")]),
    (None, [("int key = start +", "int key = 1 + start +")]),
]  # fmt: skip

# ------------------------------------------------------------------ 15: offsets

DOTS = """
extern "C" __global__ void row_dot(const float *dO, const float *O, float *D, int first, int rows,
                                   int dO_stride, int O_stride, int d) {
    for (int k = blockIdx.x * blockDim.x + threadIdx.x; k < rows; k += gridDim.x * blockDim.x) {
        const float *a = dO + (long long)(first + k) * dO_stride;
        const float *b = O + (long long)(first + k) * O_stride;
        float sum = 0;
        for (int c = 0; c < d; ++c) sum += a[c] * b[c];
        D[k] = sum;
    }
}
"""
A, B = "(long long)(first + k) * dO_stride", "(long long)(first + k) * O_stride"
OFFSET_RIGHT = [
    DOTS,
    made(DOTS, (A, "(size_t)dO_stride * (first + k)"), (B, "(i64)O_stride * (first + k)")),
    made(DOTS, (A, "static_cast<i64>(first + k) * dO_stride"), (B, "(first + k) * 1LL * O_stride")),
    edited(source("offset_in_32_bits"),
           {12: "sum += dO[row * (i64)dO_stride + c] * O[row * (size_t)O_stride + c];"}),
]  # fmt: skip
OFFSET_WRONG = [
    ("widened-after-the-product",
     [(A, "(long long)((first + k) * dO_stride)"), (B, "(long long)((first + k) * O_stride)")]),
    ("widened-after-the-product", [(A, "(first + k) * dO_stride"), (B, "(first + k) * O_stride")]),
    ("widened-after-the-product",
     [(A, "(int)((long long)(first + k) * dO_stride)"), (B, "(int)((i64)(first + k) * O_stride)")]),
    ("one-of-the-two", [(A, "(first + k) * dO_stride")]),
    ("one-of-the-two", [(B, "(first + k) * O_stride")]),
    ("unsigned-only", [(A, "(u32)(first + k) * dO_stride"), (B, "O_stride * (u32)(first + k)")]),
    ("first-forgotten", [(A, "(long long)k * dO_stride"), (B, "k * (long long)O_stride")]),
    ("one-stride-for-both", [(B, A)]),
    ("one-stride-for-both", [(A, B)]),
    ("through-a-float",
     [(A, "(i64)((float)dO_stride * (first + k))"), (B, "(i64)((float)O_stride * (first + k))")]),
    ("negative-made-0",
     [(A, "max(0, (first + k) * dO_stride)"), (B, "max(0, (first + k) * O_stride)")]),
    (None, [("c < d", "c < d - 1")]),
    (None, [("sum += a[c] * b[c]", "sum = a[c] * b[c]")]),
]  # fmt: skip

# ------------------------------------------------------------------ 16: the rescale

GAP = """
            float before = m[row];
            for (int j = 0; j < Bc; ++j)
                if (S[row][j] > m[row]) m[row] = S[row][j];
            // early
            float base = m[row] > -INFINITY ? m[row] : 0.f;
            rescale[row] = expf(before - base);
            l[row] *= rescale[row];
            for (int j = 0; j < Bc; ++j) {
                float p = expf(S[row][j] - base);
                S[row][j] = p;
                l[row] += p;
            }
            // last
"""
TAKE, LATE = "        o = rescale[r] * o;", "        // after"


def rung(*changes, take=TAKE, late=LATE):
    gap = made(GAP, *changes)
    return edited(source("rescale_gap"), replace={32: gap, 35: take}, after={36: late})


FACTOR, SCALE_L = "rescale[row] = expf(before - base);", "l[row] *= rescale[row];"
WITH_A_SUM = rung(
    (SCALE_L, "float part = 0.f;"),
    ("l[row] += p;", "part = part + p;"),
    ("// last", "l[row] = part + (before == -INFINITY ? 0.f : l[row] * rescale[row]);"),
)
BY_A_TEST = rung((FACTOR, "rescale[row] = before == m[row] ? 1.f : expf(before - base);"))
RESCALE_RIGHT = [rung(), WITH_A_SUM, BY_A_TEST, rung(take="", late="        __syncthreads();")
                 .replace("for (int j = 0; j < Bc; j++) o += S[r][j] * Vj[j][c];",
                          "float t = 0.f; for (int j = 0; j < Bc; j++) t += S[r][j] * Vj[j][c];\n"
                          "        o = o * rescale[r] + t;")]  # fmt: skip
RESCALE_WRONG = [
    ("rescale-inverted", rung((FACTOR, "rescale[row] = expf(base - before);"))),
    ("l-rescaled-not-O", rung(take="")),
    ("O-rescaled-not-l", rung((SCALE_L, ""))),
    ("factor-is-1", rung((SCALE_L, ""), take="")),
    ("factor-is-1", rung(("// early", "before = m[row];"))),
    ("m-not-updated", rung(("// last", "m[row] = before;"))),
    ("rescaled-after-the-sum", rung(take="", late=TAKE)),
    ("new-part-rescaled-too", rung((SCALE_L, ""), ("// last", SCALE_L))),
    ("l-overwritten", rung((SCALE_L, "l[row] = 0.f;"))),
    ("weights-not-stored", rung(("S[row][j] = p;", ""))),
    ("no-maximum-subtracted", rung((FACTOR, "rescale[row] = 1.f;"), ("// last", "m[row] = 0.f;"),
                                   ("m[row] > -INFINITY ? m[row] : 0.f", "0.f"))),
    ("divided-in-each-tile", rung(late="        o = o / l[r];")),
    ("maximum-of-this-tile-only", rung(("float before = m[row];",
                                        "float before = m[row]; m[row] = -INFINITY;"))),
    ("nothing-seen-gives-nan", rung(("m[row] > -INFINITY ? m[row] : 0.f", "m[row]"))),
    ("factor-of-another-row", rung(take="        o *= rescale[threadIdx.x % 4];")),
    ("factor-of-another-row", rung(take="        o *= rescale[threadIdx.x % 2];")),
    ("factor-never-written", rung((FACTOR, "float f = expf(before - base);"),
                                  (SCALE_L, "l[row] *= f;"))),
    (None, rung(("l[row] += p;", "l[row] += 2.f * p;"))),
]  # fmt: skip


def edits(text, table):
    return [(name, made(text, *changes)) for name, changes in table]


RIGHT = {
    "ex13-barrier": BARRIER_RIGHT,
    "ex14-guards": GUARD_RIGHT,
    "ex15-offsets": OFFSET_RIGHT,
    "ex16-rescale": RESCALE_RIGHT,
}
WRONG = {
    "ex13-barrier": edits(LSE, BARRIER_WRONG),
    "ex14-guards": edits(ATTEND, GUARD_WRONG),
    "ex15-offsets": edits(DOTS, OFFSET_WRONG),
    "ex16-rescale": RESCALE_WRONG,
}
CASES = [(id, name, text) for id in WRONG for name, text in WRONG[id]]


def fits(result):
    lines = repr(result).splitlines()
    return len(lines) <= 5 and max(map(len, lines)) <= 88


@pytest.mark.parametrize("id", RIGHT)
def test_right_kernels_pass(id):
    assert set(RIGHT) == set(KERNELS) and len(RIGHT[id]) >= 3
    for text in RIGHT[id]:
        for seed in range(2):
            result = check_kernel(KERNELS[id], text, seed)
            assert result.status == "passed" and fits(result), (seed, text, result)


@pytest.mark.parametrize("id, name, text", CASES, ids=[f"{i}-{n}" for i, n, _ in CASES])
def test_wrong_kernels_are_called_by_their_name(id, name, text):
    for seed in range(2):
        result = check_kernel(KERNELS[id], text, seed)
        assert (result.status, result.misconception) == ("not yet", name), (seed, result)
        assert fits(result) and "traces" not in result.message, result


@pytest.mark.parametrize("id", RIGHT)
def test_every_mistake_is_recognised_as_itself_and_met_from_outside(id):
    exercise = KERNELS[id].program
    names = {m.id for m in exercise.mistakes}
    assert len(names) >= 6 and names == {name for name, _ in WRONG[id]} - {None}
    for mistake in exercise.mistakes:
        assert check_program(exercise, mistake.program, 5).misconception == mistake.id


@pytest.mark.parametrize("id", RIGHT)
def test_no_verdict_depends_on_the_seed(id):
    """Every twentieth of COURSE_SEEDS seeds."""
    q = KERNELS[id]
    right = [on_standin(q.launch, q.arrays, text) for text in RIGHT[id]]
    wrong = [(name, on_standin(q.launch, q.arrays, text)) for name, text in WRONG[id]]
    wrong += [(m.id, m.program) for m in q.program.mistakes]
    telling = [0] * len(wrong)
    for seed in SEEDS:
        for program in right:
            assert fails_on(q.program, program, seed) is None, seed
        for k, (name, program) in enumerate(wrong):
            telling[k] = fails_on(q.program, program, seed, first=telling[k])
            assert telling[k] is not None, (seed, name)


@pytest.mark.parametrize("id", RIGHT)
def test_the_given_kernel_is_not_attempted_and_not_right(id):
    q = KERNELS[id]
    text = source(q.given)
    assert check(id, text).status == "not attempted"
    assert check(id, f"\n{text}\n\n").status == "not attempted"
    assert check(id, ...).status == "not attempted"
    assert fails_on(q.program, on_standin(q.launch, q.arrays, text)) is not None


@pytest.mark.parametrize("id", RIGHT)
def test_other_answers_get_a_sentence(id):
    good = RIGHT[id][0]
    for answer in ("", "text", 3, print, b"x", ["x"]):
        result = check(id, answer)
        assert result.status == "not yet" and "text of a kernel" in result.message
    for line in ('#include "/etc/hosts"', "# define d 3", 'asm("");'):
        result = check(id, good.replace("{", "{\n" + line + "\n", 1))
        assert result.status == "not yet" and "leave out" in result.message, line


def test_an_endless_kernel_ends(monkeypatch):
    from attention_lib.checks import judge

    monkeypatch.setattr(judge, "TIME_LIMIT", 0.3)
    text = NO_S.replace("bool mine", "while (1) { }\n    bool mine", 1)
    result = check("ex13-barrier", text)
    assert (result.status, result.misconception) == ("not yet", "never-ends")


def test_one_warps_barrier_is_not_the_blocks():
    result = check("ex13-barrier", made(LSE, ("// here", "__syncwarp();")))
    assert (result.status, result.misconception) == ("not yet", "one-warp-only") and fits(result)


def test_what_the_kernel_raises_is_told():
    text = made(LSE, ("// here", WAIT), ("float top", "float odd[2] = {}; odd[2] = 1.f; float top"))
    result = check("ex13-barrier", text)
    assert result.status == "raised" and "odd has 2 elements" in result.message and fits(result)


needs_nvrtc = pytest.mark.skipif(not nvrtc.available(), reason="needs a GPU's compiler (NVRTC)")


@needs_nvrtc
def test_the_compilers_line_is_told():
    text = edited(source("missing_barrier"), after={21: "        __syncthreads()"})
    result = check("ex13-barrier", text)
    assert result.status == "raised" and fits(result)
    assert "the compiler says: line 23:" in result.message and '";"' in result.message


@needs_nvrtc
@pytest.mark.parametrize("id", RIGHT)
def test_all_kernels_are_cuda(id):
    """The stand-in takes nothing for right, or for a known mistake, that is no CUDA C++."""
    given = [source(KERNELS[id].given)]
    for text in (*given, *RIGHT[id], *(text for _, text in WRONG[id])):
        assert own.compiler_says(text) is None, text


def test_without_a_compiler_the_answer_is_the_same(monkeypatch):
    monkeypatch.setattr(nvrtc, "available", lambda: False)
    assert check("ex13-barrier", RIGHT["ex13-barrier"][0]).status == "passed"
    assert check("ex15-offsets", WRONG["ex15-offsets"][0][1]).status == "not yet"
    result = check("ex13-barrier", edited(source("missing_barrier"), after={21: "__syncthreads()"}))
    assert result.status == "not yet" and "line 23" in result.message, result


def test_with_a_gpu_the_kernel_is_run_there_too(monkeypatch):
    """A GPU in name only: what it gives back is compared, and told apart."""
    q, text = KERNELS["ex13-barrier"], RIGHT["ex13-barrier"][0]
    monkeypatch.setattr(gpu, "available", lambda: True)

    def as_here(text, launch):
        program = on_standin(lambda: launch, q.arrays, text)
        return list(program()[1:])

    monkeypatch.setattr(cuda, "on_gpu", as_here)
    assert "On this GPU too: 8." in check_kernel(q, text).message
    monkeypatch.setattr(cuda, "on_gpu", lambda text, launch: [as_here(text, launch)[0] + 1])
    result = check_kernel(q, text)
    assert result.status == "not yet" and "on the GPU L[0] is" in result.message and fits(result)
    monkeypatch.setattr(cuda, "on_gpu", lambda text, launch: None)
    assert check_kernel(q, text).status == "passed"


@pytest.mark.skipif(not gpu.available(), reason="needs a GPU")
@pytest.mark.parametrize("id", RIGHT)
def test_right_kernels_pass_on_this_gpu(id):
    for text in RIGHT[id]:
        result = check(id, text)
        assert result.status == "passed" and "On this GPU too" in result.message, result


@pytest.mark.skipif(gpu.available(), reason="needs a machine without a GPU")
def test_the_command_says_what_is_missing():
    done = subprocess.run(
        [sys.executable, "-m", "attention_lib.gpu.broken", "missing_barrier"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1 and done.stderr.startswith("NoGPU: ")
    assert "Traceback" not in done.stderr


# ------------------------------------------------------------------ editing


def test_edited_puts_lines_where_they_were_asked_for():
    text = "a\nb\nc\n"
    assert edited(text, replace={2: "x"}) == "a\nx\nc\n"
    assert edited(text, after={0: "x", 3: "y\nz"}) == "x\na\nb\nc\ny\nz\n"
    assert edited(text, {1: ""}, {1: "x", 2: "y"}) == "\nx\nb\ny\nc\n"
    with pytest.raises(ValueError, match="after has line 4; accepted: 0 to 3"):
        edited(text, after={4: "x"})
    with pytest.raises(ValueError, match="replace has line 0; accepted: 1 to 3"):
        edited(text, replace={0: "x"})


@pytest.mark.parametrize("name", broken.NAMES)
def test_a_listing_is_the_text_with_numbers(name):
    lines = broken.listing(name).split("\n")
    assert [int(x[:2]) for x in lines] == list(range(1, len(lines) + 1))
    assert "\n".join(x[4:] for x in lines) + "\n" == source(name)
    with pytest.raises(ValueError, match="name is 'none'; accepted: 'missing_barrier'"):
        source("none")
    made = broken.example(name)
    assert all(isinstance(made.args[k], np.ndarray) for k in made.outputs)


# ------------------------------------------------------------------ 17: tiles


def as_printed(Br, Bc, d, buffers):
    return 2 * (Br + 2 * Bc * buffers) * (d + 2) + 4 * Br * (Bc + 4)


def by_arrays(Br, Bc, d, buffers):
    shapes = [(Br, d + 2, 2)] + [(Bc, d + 2, 2)] * (2 * buffers) + [(Br, Bc + 1, 4)]
    shapes += [(Br, 1, 4)] * 3
    return int(sum(np.prod(x) for x in shapes))


def by_struct(Br, Bc, d, buffers):
    of = np.dtype([("Q", "f2", (Br, d + 2)), ("K", "f2", (buffers, Bc, d + 2)),
                   ("V", "f2", (buffers, Bc, d + 2)), ("S", "f4", (Br, Bc + 1)),
                   ("m", "f4", Br), ("l", "f4", Br), ("rescale", "f4", Br)])  # fmt: skip
    return of.itemsize


BYTES_RIGHT = [as_printed, by_arrays, by_struct]


def changed(old, new):
    source = "2 * (Br + 2 * Bc * buffers) * (d + 2) + 4 * Br * (Bc + 4)"
    code = made(source, (old, new))
    return eval(f"lambda Br, Bc, d, buffers: {code}")


BYTES_WRONG = [
    ("s-forgotten", changed("(Bc + 4)", "3")),
    ("s-forgotten", changed(" + 4 * Br * (Bc + 4)", "")),
    ("v-forgotten", changed("2 * Bc * buffers", "Bc * buffers")),
    ("q-forgotten", changed("(Br + 2", "(2")),
    ("buffers-forgotten", changed(" * buffers", "")),
    ("q-doubled-too", changed("Br + 2 * Bc * buffers", "(Br + 2 * Bc) * buffers")),
    ("padding-forgotten", changed("(d + 2)", "d")),
    (
        "padding-forgotten",
        lambda Br, Bc, d, buffers: 2 * (Br + 2 * Bc * buffers) * d + 4 * Br * (Bc + 3),
    ),
    ("one-float-a-row-missing", changed("Bc + 4", "Bc + 3")),
    ("statistics-forgotten", changed("Bc + 4", "Bc + 1")),
    ("s-in-16-bits", changed("+ 4 * Br", "+ 2 * Br")),
    ("tiles-in-32-bits", changed("2 * (Br", "4 * (Br")),
    (
        "elements-not-bytes",
        lambda Br, Bc, d, buffers: (Br + 2 * Bc * buffers) * (d + 2) + Br * (Bc + 4),
    ),
    (None, lambda Br, Bc, d, buffers: 0),
]


def choose(order, used=as_printed, room=lambda used, shared: used + 1024 <= shared,
           sizes=tuple(range(128, 0, -16))):  # fmt: skip
    """The first tile that fits, in an order of all tiles."""

    def program(d, shared, buffers):
        tiles = sorted(((a, b) for a in sizes for b in sizes), key=order, reverse=True)
        return next((x for x in tiles if room(used(*x, d, buffers), shared)), (0, 0))

    return program


def by_algebra(d, shared, buffers):
    for Br in range(128, 15, -16):
        left = shared - 1024 - 2 * Br * (d + 2) - 16 * Br
        Bc = min(128, left // (4 * buffers * (d + 2) + 4 * Br) // 16 * 16)
        if Bc >= 16:
            return Br, Bc
    return [0, 0]


def step_by_step(d, shared, buffers):
    best = 0, 0
    for Bc in range(16, 129, 16):
        for Br in range(16, 129, 16):
            if by_arrays(Br, Bc, d, buffers) <= shared - 1024 and (Br, Bc) > best:
                best = Br, Bc
    return best


def br_first(tile):
    return tile


CHOOSE_RIGHT = [choose(br_first), by_algebra, step_by_step]
CHOOSE_WRONG = [
    ("bc-first", choose(lambda x: (x[1], x[0]))),
    ("largest-area", choose(lambda x: (x[0] * x[1], x[0]))),
    ("square-by-habit", choose(lambda x: (min(x), x[0] == x[1]))),
    ("system-forgotten", choose(br_first, room=lambda used, shared: used <= shared)),
    ("not-to-the-last-byte", choose(br_first, room=lambda used, shared: used + 1024 < shared)),
    ("buffers-forgotten", choose(br_first, used=lambda a, b, d, n: as_printed(a, b, d, 1))),
    ("s-forgotten", choose(br_first, used=BYTES_WRONG[0][1])),
    ("padding-forgotten", choose(br_first, used=BYTES_WRONG[7][1])),
    ("elements-not-bytes", choose(br_first, used=BYTES_WRONG[12][1])),
    ("powers-of-two-only", choose(br_first, sizes=(128, 64, 32, 16))),
    ("two-blocks-by-habit", choose(br_first, room=lambda u, shared: u + 1024 <= shared // 2)),
    (None, lambda d, shared, buffers: (64, 64)),
]
TILES_RIGHT = {"ex17-bytes": BYTES_RIGHT, "ex17-tiles": CHOOSE_RIGHT}
TILES_WRONG = {"ex17-bytes": BYTES_WRONG, "ex17-tiles": CHOOSE_WRONG}


@pytest.mark.parametrize("id", TILES_RIGHT)
def test_tiles_right_wrong_and_recognised(id):
    exercise = _QUESTIONS[id]
    for program in TILES_RIGHT[id]:
        assert check(id, program).status == "passed", program
    for name, program in TILES_WRONG[id]:
        for seed in range(3):
            result = check_program(exercise, program, seed)
            assert (result.status, result.misconception) == ("not yet", name), result
            assert fits(result)
    names = {m.id for m in exercise.mistakes}
    assert len(names) >= 10 and names == {name for name, _ in TILES_WRONG[id]} - {None}
    for mistake in exercise.mistakes:
        assert check_program(exercise, mistake.program, 5).misconception == mistake.id


@pytest.mark.parametrize("d", ladder.HEAD_DIMENSIONS)
def test_the_bytes_are_those_that_rung_2_asks_for(d):
    assert ex17.block_bytes(64, 64, d, 1) == by_struct(64, 64, d, 1)
    assert by_struct(64, 64, d, 1) == ladder.rung("q_outer").shared(d)


def test_the_numbers_by_hand():
    assert as_printed(16, 32, 8, 1) == ex17.block_bytes(16, 32, 8, 1) == 3904
    assert ex17.block_bytes(16, 16, 256, 2) == 42_560
    assert ex17.block_bytes(32, 16, 256, 2) == 52_096
    assert check("ex14-threads", 24).status == "passed"
    assert check("ex15-first-row", 262_144).status == "passed"
    assert check("ex17-blocks", 3).status == "passed"
    assert (ex13.BR, ex16.BR, ex14.BC) == (4, 4, 4) and ex15.HIDDEN == 8192
