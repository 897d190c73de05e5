"""CUDA C++ on the stand-in: the text of a kernel becomes a kernel that run_grid runs.

A part of the language, as much as the exercises need: one __global__ function with float and
integer variables, arrays in registers and in shared memory, pointers, if, for, while, and
__syncthreads(). An int has 32 bits and wraps round at 2^31; a float is a float32. pycparser reads
the text, each statement becomes a line of Python. What else there is in C++ is refused by name.
"""

import functools
import keyword
import re

import numpy as np
from pycparser import CParser, c_ast

from attention_lib.gpu.standin import i32

BEFORE = "typedef int bool; typedef long long i64; typedef unsigned long long size_t;\n"
BEFORE += "typedef unsigned u32;\n"
BLANKED = r'extern\s+"C"|__global__|__launch_bounds__\s*\([^()]*\)|__restrict__|#pragma unroll.*'
RANKS = ("int", "unsigned", "i64", "size_t", "float")  # of two types the later one is the result's
CONVERT = {
    "int": "__int({})",
    "unsigned": "__whole({}) % 2**32",
    "i64": "__whole({})",
    "size_t": "__whole({}) % 2**64",
    "float": "__float({})",
}
ONE = {"expf": "exp", "exp": "exp", "__expf": "exp", "exp2f": "exp2", "logf": "log", "log": "log"}
ONE |= {"__logf": "log", "sqrtf": "sqrt", "sqrt": "sqrt", "fabsf": "abs"}
TWO = {"fmaxf": "fmax", "fmax": "fmax", "max": "fmax", "fminf": "fmin", "fmin": "fmin"}
TWO["min"] = "fmin"
PLACES = {"threadIdx", "blockIdx", "blockDim", "gridDim"}


class NotRead(ValueError):
    """The text is no kernel that the stand-in can read; says where and why."""


class Pointer:
    """An address in a watched array: p[i], and p + i by `moved`."""

    def __init__(self, memory, offset=0):
        self.memory, self.offset = memory, offset

    def __getitem__(self, i):
        return self.memory[self.offset + i]

    def __setitem__(self, i, value):
        self.memory[self.offset + i] = value

    def moved(self, i):
        return Pointer(self.memory, self.offset + i)


class Local:
    """An array in a thread's registers."""

    def __init__(self, name, values):
        self.name, self.values = name, values

    def _inside(self, i):
        if not 0 <= i < len(self.values):
            raise IndexError(f"{self.name}[{i}]: {self.name} has {len(self.values)} elements")
        return i

    def __getitem__(self, i):
        return self.values[self._inside(i)]

    def __setitem__(self, i, value):
        self.values[self._inside(i)] = value


def _local(name, type, size, given):
    """given: the first values, the others are 0; None: nobody has written them yet."""
    fresh = _poison(type) if given is None else np.float32(0) if type == "float" else 0
    return Local(name, [*(given or []), *[fresh] * (size - len(given or []))])


def _poison(type):
    return np.float32(np.nan) if type == "float" else -(2**31)


def _whole(x):
    return int(x) if np.isfinite(x) else -(2**31)


def _int(x):
    return i32(_whole(x))


def _divided(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)  # C rounds towards 0


def _rest(a, b):
    return a - b * _divided(a, b)


GIVEN = {
    "__int": _int,
    "__whole": _whole,
    "__float": np.float32,
    "__divided": _divided,
    "__rest": _rest,
    "__poison": _poison,
    "__local": _local,
    "__Pointer": Pointer,
    "__np": np,
}


@functools.lru_cache(maxsize=256)
def kernel(text):
    """The kernel in this text, for run_grid: its parameters have the names that they have there.

    `kernel(text).parameters` is a tuple of (name, type): "float*", "int*", "float", "int", "i64",
    ... Raises NotRead.
    """
    plain = re.sub(r"//[^\n]*|/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL)
    plain = re.sub(BLANKED, "", plain)
    plain = re.sub(r"static_cast\s*<([\w ]+)>\s*\(", r"(\1)(", plain)
    plain = re.sub(r"\bconstexpr\b", "const", plain).replace("__shared__", "static")
    for number, line in enumerate(plain.split("\n"), 1):
        if re.search(r"#|\b(template|asm|struct|auto|__syncwarp)\b|\w<\w+>\(", line):
            raise NotRead(f"line {number}: the stand-in cannot read {line.strip()!r}")
    try:
        tree = CParser().parse(f'{BEFORE}# 1 "kernel"\n{plain}', "kernel")
    except Exception as error:  # pycparser has a class of its own for it in each version
        said = str(error).replace("kernel:", "line ", 1)
        raise NotRead(f"no C that can be read, at {said}") from None
    return _Writer().function(tree)


class _Writer:
    """Writes the Python lines. names: the scopes, innermost last: {name: (kind, type)}."""

    def __init__(self):
        self.lines, self.depth, self.scopes, self.steps = [], 1, [{}], []

    def function(self, tree):
        functions = [x for x in tree.ext if isinstance(x, c_ast.FuncDef)]
        if len(functions) != 1:
            raise NotRead(f"the text has {len(functions)} functions; the stand-in reads one kernel")
        (function,) = functions
        about = []
        for given in function.decl.type.args.params if function.decl.type.args else ():
            pointer = isinstance(given.type, c_ast.PtrDecl)
            type = self.type(given.type.type if pointer else given.type)
            name = self.declare(given, given.name, "pointer" if pointer else "value", type)
            about.append((name, type + "*" * pointer))
            if pointer:
                self.write(f"{name} = __Pointer({name})")
        for thing in tree.ext:
            if isinstance(thing, c_ast.Decl):
                self.statement(thing)
        self.statement(function.body)
        names = ", ".join(["__t", *(name for name, _ in about)])
        source = "\n".join([f"def {function.decl.name}({names}):", *self.lines])
        space = dict(GIVEN)
        exec(compile(source, "<your kernel>", "exec"), space)
        made = space[function.decl.name]
        made.parameters = tuple(about)
        return made

    def write(self, line):
        self.lines.append("    " * self.depth + line)

    def refuse(self, node, why):
        line = getattr(node.coord, "line", "?")
        raise NotRead(f"line {line}: the stand-in cannot read {why}")

    def declare(self, node, name, kind, type):
        if name.startswith("__"):
            self.refuse(node, f"the name {name}")
        name += "_" * keyword.iskeyword(name)
        if any(name in scope for scope in self.scopes):
            self.refuse(node, f"a second {name} inside the first one's braces; choose another name")
        self.scopes[-1][name] = (kind, type)
        return name

    def find(self, node):
        name = node.name + "_" * keyword.iskeyword(node.name)
        for scope in reversed(self.scopes):
            if name in scope:
                return name, *scope[name]
        self.refuse(node, f"{node.name}, which is not declared")

    def type(self, node):
        """The type of a TypeDecl, one of RANKS."""
        node = node.type if isinstance(node, c_ast.TypeDecl) else node
        words = set(getattr(node, "names", ()))
        if words <= {"float", "double"} and words:
            return "float"
        wide = "long" in words or words & {"i64", "size_t"}
        if words & {"unsigned", "u32", "size_t"}:
            return "size_t" if wide else "unsigned"
        if words and words <= {"int", "bool", "signed", "short", "long", "i64"}:
            return "i64" if wide else "int"
        self.refuse(node, f"the type {' '.join(sorted(words)) or '?'}")

    # ---- statements

    def statement(self, node):
        if node is None:
            return
        write = getattr(self, "do_" + type(node).__name__, None)
        if write is None:
            self.refuse(node, f"this statement ({type(node).__name__})")
        write(node)

    def block(self, *nodes):
        """These statements one step deeper, in a scope of their own."""
        self.depth += 1
        self.scopes.append({})
        start = len(self.lines)
        for node in nodes:
            self.statement(node)
        if len(self.lines) == start:
            self.write("pass")
        self.scopes.pop()
        self.depth -= 1

    def do_Compound(self, node):
        self.scopes.append({})
        for item in node.block_items or ():
            self.statement(item)
        self.scopes.pop()

    def do_DeclList(self, node):
        for decl in node.decls:
            self.statement(decl)

    def do_ExprList(self, node):
        for item in node.exprs:
            self.statement(item)

    def do_EmptyStatement(self, node):
        pass

    def do_Decl(self, node):
        sizes, inner = [], node.type
        while isinstance(inner, c_ast.ArrayDecl):
            sizes.append(self.expression(inner.dim)[0])
            inner = inner.type
        if isinstance(inner, c_ast.PtrDecl):
            code, kind, of = self.pointer(node.init)
            self.write(f"{self.declare(node, node.name, 'pointer', of)} = {code}")
            return
        type, shared = self.type(inner), "static" in node.storage
        if shared:
            name = self.declare(node, node.name, "shared" if sizes else "one", type)
            dtype = "float32" if type == "float" else "int32"
            shape = ", ".join(sizes or ["1"])
            self.write(f"{name} = __t.shared({node.name!r}, {shape}, dtype=__np.{dtype})")
        elif sizes:
            if len(sizes) > 1:
                self.refuse(node, "an array of two axes in registers")
            given = "None"
            if node.init is not None:
                given = [self.converted(x, type) for x in node.init.exprs]
                given = f"[{', '.join(given)}]"
            name = self.declare(node, node.name, "array", type)
            self.write(f"{name} = __local({node.name!r}, {type!r}, {sizes[0]}, {given})")
        else:
            value = self.converted(node.init, type) if node.init else f"__poison({type!r})"
            self.write(f"{self.declare(node, node.name, 'value', type)} = {value}")

    def do_Assignment(self, node):
        value = node.rvalue
        if isinstance(value, c_ast.Assignment):  # a = b = c: the inner one first
            self.do_Assignment(value)
            value = value.lvalue
        if node.op != "=":
            value = c_ast.BinaryOp(node.op[:-1], node.lvalue, value, node.coord)
        if isinstance(node.lvalue, c_ast.ID) and self.find(node.lvalue)[1] == "pointer":
            self.write(f"{self.find(node.lvalue)[0]} = {self.pointer(value)[0]}")
            return
        place, type = self.place(node.lvalue)
        self.write(f"{place} = {self.converted(value, type)}")

    def do_UnaryOp(self, node):
        if node.op not in ("p++", "++", "p--", "--"):
            self.refuse(node, f"{node.op} as a statement")
        one = c_ast.Constant("int", "1", node.coord)
        self.do_Assignment(c_ast.Assignment(node.op[-1] + "=", node.expr, one, node.coord))

    def do_FuncCall(self, node):
        if node.name.name != "__syncthreads" or node.args:
            self.refuse(node, f"the call of {node.name.name}")
        self.write("yield")

    def do_Return(self, node):
        self.write("return")

    def do_If(self, node):
        self.write(f"if {self.expression(node.cond)[0]}:")
        self.block(node.iftrue)
        if node.iffalse:
            self.write("else:")
            self.block(node.iffalse)

    def do_For(self, node):
        self.scopes.append({})
        self.statement(node.init)
        self.loop(node.cond, node.stmt, node.next)
        self.scopes.pop()

    def do_While(self, node):
        self.loop(node.cond, node.stmt, None)

    def loop(self, condition, body, step):
        self.write(f"while {self.expression(condition)[0] if condition else 'True'}:")
        self.steps.append(step)
        self.block(body, step)
        self.steps.pop()

    def do_Break(self, node):
        self.write("break")

    def do_Continue(self, node):
        self.statement(self.steps[-1])
        self.write("continue")

    # ---- expressions

    def converted(self, node, to):
        code, type = self.expression(node)
        return code if type == to else CONVERT[to].format(code)

    def place(self, node):
        """The Python code and type of what can stand on the left of an assignment."""
        if isinstance(node, c_ast.UnaryOp) and node.op == "*":
            code, _, of = self.pointer(node.expr)
            return f"{code}[0]", of
        indices, inner = [], node
        while isinstance(inner, c_ast.ArrayRef):
            code, type = self.expression(inner.subscript)
            if type == "float":
                self.refuse(node, "a float as an index")
            indices.insert(0, code)
            inner = inner.name
        if not isinstance(inner, c_ast.ID):
            if len(indices) == 1:
                code, _, of = self.pointer(inner)
                return f"{code}[{indices[0]}]", of
            self.refuse(node, "this place")
        name, kind, type = self.find(inner)
        if kind == "one" and not indices:
            return f"{name}[0]", type
        if (kind == "value") != (not indices) or (kind != "shared" and len(indices) > 1):
            self.refuse(node, f"{name} with {len(indices)} indices")
        return (f"{name}[{', '.join(indices)}]" if indices else name), type

    def pointer(self, node):
        """(code, "pointer", what it points to) of an address."""
        if isinstance(node, c_ast.ID):
            name, kind, of = self.find(node)
            if kind == "pointer":
                return name, kind, of
        if isinstance(node, c_ast.UnaryOp) and node.op == "&":
            if isinstance(node.expr, c_ast.ArrayRef):
                sum = c_ast.BinaryOp("+", node.expr.name, node.expr.subscript, node.coord)
                return self.pointer(sum)
        if isinstance(node, c_ast.BinaryOp) and node.op in "+-":
            code, kind, of = self.pointer(node.left)
            offset, type = self.expression(node.right)
            if type != "float":
                return f"{code}.moved({'-' * (node.op == '-')}{offset})", kind, of
        self.refuse(node or c_ast.ID("?"), "this as an address")

    def expression(self, node):
        """(Python code, type)."""
        read = getattr(self, "of_" + type(node).__name__, None)
        if read is None:
            self.refuse(node, f"this expression ({type(node).__name__})")
        return read(node)

    def of_Constant(self, node):
        if node.type in ("float", "double"):
            return f"__float({node.value.rstrip('fFlL')})", "float"
        digits = node.value.rstrip("uUlL")
        wide = "i64" if "l" in node.value.lower()[len(digits) :] else "int"
        return str(int(digits, 0)), "unsigned" if node.value[-1] in "uU" else wide

    def of_ID(self, node):
        if node.name == "INFINITY":
            return "__np.float32(__np.inf)", "float"
        if node.name in ("true", "false"):
            return str(int(node.name == "true")), "int"
        return self.place(node)

    def of_ArrayRef(self, node):
        return self.place(node)

    def of_StructRef(self, node):
        place = getattr(node.name, "name", None)
        if place not in PLACES or node.field.name not in "xyz" or node.type != ".":
            self.refuse(node, f"{place}{node.type}{node.field.name}")
        if node.field.name == "x":
            return f"__t.{place}", "unsigned"
        return ("0" if place.endswith("Idx") else "1"), "unsigned"

    def of_Cast(self, node):
        to = self.type(node.to_type.type)
        return f"({self.converted(node.expr, to)})", to

    def of_TernaryOp(self, node):
        (a, first), (b, second) = self.expression(node.iftrue), self.expression(node.iffalse)
        type = max(first, second, key=RANKS.index)
        a, b = self.converted(node.iftrue, type), self.converted(node.iffalse, type)
        return f"({a} if {self.expression(node.cond)[0]} else {b})", type

    def of_UnaryOp(self, node):
        if node.op == "*":
            return self.place(node)
        code, type = self.expression(node.expr)
        if node.op == "!":
            return f"int(not {code})", "int"
        if node.op not in "+-":
            self.refuse(node, f"{node.op} inside an expression")
        return f"({node.op}{code})", type

    def of_BinaryOp(self, node):
        op = node.op
        if op in ("&&", "||"):
            words = {"&&": "and", "||": "or"}[op]
            return (
                f"({self.expression(node.left)[0]} {words} {self.expression(node.right)[0]})",
                "int",
            )
        type = max((self.expression(x)[1] for x in (node.left, node.right)), key=RANKS.index)
        a, b = self.converted(node.left, type), self.converted(node.right, type)
        if op in ("<", "<=", ">", ">=", "==", "!="):
            return f"({a} {op} {b})", "int"
        if op in ("/", "%") and type != "float":
            return f"{'__divided' if op == '/' else '__rest'}({a}, {b})", type
        if op in ("^", "&", "|", "<<", ">>") and type == "float" or op not in "+-*/%^&|<<>>":
            self.refuse(node, f"{op} of a {type}")
        return f"({CONVERT[type].format(f'({a} {op} {b})')})", type

    def of_FuncCall(self, node):
        name, given = getattr(node.name, "name", "?"), node.args.exprs if node.args else ()
        if name in ONE and len(given) == 1:
            return f"__np.{ONE[name]}({self.converted(given[0], 'float')})", "float"
        if name in TWO and len(given) == 2:
            type = "float" if name.startswith("f") else "int"
            type = max((self.expression(x)[1] for x in given), key=RANKS.index, default=type)
            type = "float" if name.startswith("f") else type
            a, b = (self.converted(x, type) for x in given)
            function = f"__np.{TWO[name]}" if type == "float" else TWO[name][1:]
            return f"{function}({a}, {b})", type
        self.refuse(node, f"the call of {name}")
