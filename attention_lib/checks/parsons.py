"""Parsons problems: the lines of a program are given, out of order, some of them wrong ideas.

The answer is a string of letters, one a line. The chosen lines are put together and *run*, so each
order that computes the right thing is right. If they do not, the reply names the wrong idea that
was chosen, or the first line that uses a name before it exists, or the subgoal that is missing.
"""

import ast
import builtins
import string
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from attention_lib.checks.judge import shown
from attention_lib.checks.kinds import Program
from attention_lib.checks.programs import check_program
from attention_lib.checks.result import NOT_YET, PASSED, Result


@dataclass(frozen=True)
class Line:
    """One line, and the subgoal that it serves. A wrong one has its misconception as well."""

    code: str
    goal: str
    mistake: str | None = None
    says: str = ""  # what is wrong with it, in one sentence
    read: str = ""  # where the notebooks show it


@dataclass(frozen=True)
class Parsons:
    """Put the lines in order, between `before` and `after`.

    lines: as they are shown; their letters are A, B, C ... in this order. names: what the code may
    use besides what `before` makes. program: how the assembled function is judged.
    """

    id: str
    task: str
    before: str
    lines: tuple[Line, ...]
    after: str
    program: Program
    names: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self):
        if len(self.lines) > 26 or any(n.mistake and not (n.says and n.read) for n in self.lines):
            raise ValueError(f"{self.id}: at most 26 lines, and a wrong one says why and where")

    @property
    def letters(self):
        return dict(zip(string.ascii_uppercase, self.lines, strict=False))

    @property
    def indent(self):
        """The chosen lines stand one step deeper than the last line of `before`."""
        last = self.before.rstrip().splitlines()[-1]
        return " " * (len(last) - len(last.lstrip()) + 4)

    @property
    def text(self):
        gap = f"{self.indent}# your lines, in order"
        return "\n".join([self.task, "", self.before, gap, self.after, "", "The lines:"])

    @property
    def options(self):
        """Letter -> line, as a choice has its options: `ask` shows both in the same way."""
        return {letter: line.code for letter, line in self.letters.items()}

    def assemble(self, answer):
        """The source of the function that these letters make, and the function."""
        chosen = textwrap.indent("\n".join(self.letters[x].code for x in answer), self.indent)
        source = f"{self.before}\n{chosen}\n{self.after}\n"
        names = dict(self.names)
        exec(compile(source, "<your lines>", "exec"), names)
        return source, names[ast.parse(self.before + "\n" + self.indent + "pass").body[0].name]


def check_parsons(q: Parsons, answer):
    """Judge a string of letters. Returns a Result."""
    letters = _read(answer)
    last = list(q.letters)[-1]
    if letters is None or not set(letters) <= set(q.letters):
        return _not_yet(q, f"the answer is a string of letters, A to {last}, got {shown(answer)}.")
    if not letters:
        return _not_yet(q, f"no line yet. The answer is a string of letters, A to {last}.")
    twice = [x for x in letters if letters.count(x) > 1]
    if twice:
        return _not_yet(q, f"line {twice[0]} is there twice. Use each line at most once.")

    wrong = [x for x in letters if q.letters[x].mistake]
    unknown = _unknown_name(q, letters)
    result = None
    if not unknown:
        result = check_program(replace(q.program, id=q.id), q.assemble(letters)[1])
        if result.status == PASSED:
            return _right(q, wrong, result)
    if wrong:
        return _wrong_line(q, wrong[0], result)
    if unknown:
        return _too_early(q, letters, *unknown)
    left_out = [x for x, line in q.letters.items() if not line.mistake and x not in letters]
    if left_out:
        return _missing(q, letters, left_out[0])
    return result


def _read(answer):
    """The letters of an answer, or None: "cab", "C A B", "C, A, B", ["C", "A", "B"]."""
    if isinstance(answer, (list, tuple)) and all(isinstance(x, str) for x in answer):
        answer = "".join(answer)
    if not isinstance(answer, str):
        return None
    return [x for x in answer.upper() if not x.isspace() and x not in ",;.->"]


def _loads_and_stores(code):
    """The names that a line uses, and those that it makes."""
    nodes = [n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Name)]
    stores = {n.id for n in nodes if isinstance(n.ctx, ast.Store)}
    loads = [n.id for n in sorted(nodes, key=lambda n: n.col_offset) if n.id not in stores]
    loads += [n.id for n in nodes if n.id in stores and isinstance(n.ctx, ast.Load)]
    return loads, stores


def _names_before(q):
    tree = ast.parse(f"{q.before}\n{q.indent}pass")
    made = {
        n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    made |= {a.arg for a in ast.walk(tree) if isinstance(a, ast.arg)}
    return made | set(q.names) | set(dir(builtins))


def _unknown_name(q, letters):
    """The first line that uses a name which nothing before it makes: (position, name), or None."""
    known = _names_before(q)
    for position, letter in enumerate(letters):
        loads, stores = _loads_and_stores(q.letters[letter].code)
        for name in loads:
            if name not in known:
                return position, name
        known |= stores
    return None


def _right(q, wrong, result):
    """The program is right, so it passes, as every program that computes the right thing does.

    A wrong line in it is then one whose result a later line replaces. That is no wrong idea, since
    the line that counts was chosen too: it is said, and costs nothing.
    """
    if not wrong:
        return result
    text = f"right, but line {wrong[0]} does nothing here: leave it out."
    return Result(PASSED, f"{q.id}: {text}")


def _wrong_line(q, letter, result):
    """One of the chosen lines is a wrong idea; what it did is shown if the program ran."""
    line, ran = q.letters[letter], []
    head = f"line {letter}: {line.says}"
    if result is not None and result.status == NOT_YET:
        ran = result.message.removeprefix(f"{q.id}: ").splitlines()
        ran = [x for x in ran[1 if result.misconception else 0 :] if not x.startswith("Read: ")]
        ran.sort(key=lambda x: not x.startswith("On: "))
    return _not_yet(q, head, *ran[:2], f"Read: {line.read}", mistake=line.mistake)


def _too_early(q, letters, position, name):
    letter = letters[position]
    makers = [x for x in letters[position:] if name in _loads_and_stores(q.letters[x].code)[1]]
    text = f"line {letter}, your number {position + 1}, uses {name} before a line makes it. "
    text += f"Line {makers[0]} makes it, too late." if makers else "None of your lines makes it."
    code = f"{letter}: {q.letters[letter].code}"
    return _not_yet(q, text, code, f"Read: {q.program.read}", mistake="used-before-made")


def _missing(q, letters, letter):
    goal = q.letters[letter].goal
    some = any(q.letters[x].goal == goal for x in letters)
    text = f"a line of the subgoal '{goal}' is missing." if some else f"no line for '{goal}' yet."
    return _not_yet(q, text, f"Read: {q.program.read}", mistake="subgoal-missing")


def _not_yet(q, text, *lines, mistake=None):
    return Result(NOT_YET, "\n".join([f"{q.id}: {text}", *lines]), mistake)
