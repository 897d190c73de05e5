"""The library's code, shown in a notebook from where it stands."""

import ast
import inspect
import textwrap


def show_source(function, docstring=False):
    """Print the source of a function without its docstring, or with it if docstring=True.

    Raises TypeError for anything that has no Python source (a builtin, say).
    """
    if not inspect.isroutine(function) and not inspect.isclass(function):
        raise TypeError(f"function must be a Python function, got {type(function).__name__}")
    function = inspect.unwrap(function)
    source = textwrap.dedent(inspect.getsource(function))
    body = ast.parse(source).body[0].body
    first = body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    if is_docstring and not docstring and len(body) > 1:
        lines = source.splitlines()
        source = "\n".join(lines[: first.lineno - 1] + lines[first.end_lineno :])
    print(source.rstrip())
