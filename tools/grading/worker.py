"""The process that runs a student's code. It answers what the grader asks, over stdin and stdout.

    cell    run a cell: what it printed, what it raised
    value   what a name stands for: a number, a letter, or a function to be called later
    call    call such a function with these arguments, and say what came back

Nothing here decides about a mark: the student's code can change every object in this process, so
all that leaves it is a value that the grader judges on its own side. Started by sandbox.py, with
the settings as JSON in argv[1]; `attention_lib` is a copy without the exercises' answers.
"""

import contextlib
import importlib
import io
import json
import os
import shutil
import sys
import types
from pathlib import Path

HERE = Path(__file__).parent
MOST_PRINTED = 20_000  # characters of a cell's output that are kept


def settle(settings):
    """Into the private folder, with the student's own files in it; then give up what is left."""
    home = Path(settings["home"])
    os.chdir(home)
    if settings["files"]:
        shutil.copytree(settings["files"], home, dirs_exist_ok=True)
    if settings["fonts"]:
        shutil.copytree(settings["fonts"], settings["matplotlib"], dirs_exist_ok=True)
    if sys.platform == "win32":
        return
    import resource

    def limit(what, most):
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with contextlib.suppress(ValueError, OSError):  # macOS refuses some
            resource.setrlimit(what, (most, most))

    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_AS, settings["memory"])
    limit(resource.RLIMIT_FSIZE, settings["file"])
    limit(resource.RLIMIT_NOFILE, 256)
    limit(resource.RLIMIT_CPU, settings["cpu"])
    if settings["uid"]:  # started by root: be nobody in particular
        cache = Path(settings["matplotlib"])
        for path in (home, *home.rglob("*"), cache, *cache.rglob("*")):
            os.chown(path, settings["uid"], settings["uid"], follow_symlinks=False)
        os.setgroups([])
        os.setresgid(*[settings["uid"]] * 3)
        os.setresuid(*[settings["uid"]] * 3)
    if settings["processes"]:
        limit(resource.RLIMIT_NPROC, settings["processes"])


class Printed(io.TextIOBase):
    """What a cell prints, up to a limit; the rest is counted."""

    encoding = "utf-8"

    def __init__(self):
        self.parts, self.kept, self.lost = [], 0, 0

    def writable(self):
        return True

    def write(self, text):
        room = MOST_PRINTED - self.kept
        if room > 0:
            self.parts.append(text[:room])
            self.kept += len(text[:room])
        self.lost += max(0, len(text) - max(0, room))
        return len(text)

    def text(self):
        more = f"\n... and {self.lost:,} characters more" if self.lost else ""
        return "".join(self.parts) + more


def shell():
    """An IPython shell without a kernel: magics, display and top-level await as in a notebook."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    config.InteractiveShell.xmode = "Context"
    made = InteractiveShell.instance(config=config)
    made.displayhook.write_output_prompt = lambda: None
    made.displayhook.write_format_data = lambda data, *rest: print(data.get("text/plain", ""))
    made.enable_gui = lambda gui=None: None  # %matplotlib inline
    return made


# ---- the grader's memory, from here


def remote_memory(ask):
    """HBM and Tensor whose data and counts are the grader's: a load or store is a request."""
    import numpy as np

    from attention_lib.memory import HBM, Tensor

    class RemoteHBM(HBM):
        def __init__(self, id, budget):
            self.__dict__.update(id=id, budget=budget)

        def __getattribute__(self, name):
            if name in ("reads_by", "writes_by", "matmul_flops", "on_chip", "peak_tiles",
                        "reads", "writes", "peak_on_chip"):  # fmt: skip
                return ask("hbm", id=self.id, get=name)
            return super().__getattribute__(name)

        def tensor(self, name, array):
            if not isinstance(array, np.ndarray):
                return Tensor(self, name, array)  # says what is wrong
            return ask("tensor", id=self.id, name=name, array=array)

        def launch(self):
            ask("launch", id=self.id)

        def hold(self, name, tile):
            ask("hold", id=self.id, name=name, size=tile.size)
            return tile

        def matmul(self, A, B):
            result = A @ B
            ask("matmul", id=self.id, A=list(A.shape), B=list(B.shape))
            return result

        __repr__ = object.__repr__

    class RemoteTensor(Tensor):
        def __init__(self, id, hbm, name, shape, dtype):
            self.id, self.hbm, self.name = id, hbm, name
            self.known = tuple(shape), dtype

        @property
        def array(self):
            return ask("array", id=self.id)

        @property
        def shape(self):
            return self.known[0]

        def load(self, *index, dtype=None):
            dtype = None if dtype is None else np.dtype(dtype).name
            return ask("load", id=self.id, index=tuple(index), dtype=dtype)

        def store(self, tile, *index):
            ask("store", id=self.id, index=tuple(index), tile=np.asarray(tile))

        def __repr__(self):
            shape, dtype = self.known
            return f"Tensor({self.name!r} in HBM, shape={shape}, dtype={dtype})"

    return RemoteHBM, RemoteTensor


# ---- the library, sealed


class LibraryCalled(BaseException):
    """A function of the library was called where the task is to write one's own."""


def _raiser(code, error):
    """Code that raises `error`, to stand in for `code`: same free variables, any arguments."""

    def stand_in(*args, **kwargs):
        raise "error"  # noqa: B016

    made = stand_in.__code__
    constants = tuple(error if c == "error" else c for c in made.co_consts)
    return made.replace(
        co_consts=constants, co_freevars=code.co_freevars, co_name=code.co_name,
        co_qualname=code.co_qualname, co_filename=code.co_filename)  # fmt: skip


@contextlib.contextmanager
def sealed(allowed):
    """Every function of attention_lib that is not allowed raises; yields {name: its error}."""
    errors, before = {}, []
    for function in library_functions():
        name = function.__code__.co_qualname.split(".<locals>")[0]
        if name not in allowed:
            error = errors.setdefault(name, LibraryCalled(name))
            before.append((function, function.__code__))
            function.__code__ = _raiser(function.__code__, error)
    try:
        yield errors
    finally:
        for function, code in before:
            function.__code__ = code


def library_functions():
    found = {}

    def add(thing):
        if isinstance(thing, property):
            thing = thing.fget
        thing = getattr(thing, "__func__", thing)
        if isinstance(thing, types.FunctionType) and thing.__module__.startswith("attention_lib"):
            found[id(thing)] = thing
            if hasattr(thing, "__wrapped__"):
                add(thing.__wrapped__)

    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "attention_lib" or name.startswith("attention_lib.checks"):
            continue
        for thing in list(vars(module).values()):
            if isinstance(thing, type) and thing.__module__.startswith("attention_lib"):
                for part in list(vars(thing).values()):
                    add(part)
            else:
                add(thing)
    return list(found.values())


# ---- the conversation


class Worker:
    def __init__(self, requests, replies):
        import wire

        from attention_lib.checks import Made, judge

        self.wire, self.judge, self.made = wire, judge, Made
        self.requests, self.replies = requests, replies
        self.hbm_types = remote_memory(self.ask)
        self.functions, self.memories, self.spies = [], {}, {}
        self.shell = shell()
        self.shell._showtraceback = self.keep_traceback

    def send(self, **message):
        self.replies.write(self.wire.pack(message, self.special))
        self.replies.flush()

    def receive(self):
        frame = self.wire.read_frame(self.requests)
        if frame is None:
            os._exit(0)
        return self.wire.unpack(frame, self.from_grader)

    def ask(self, what, **details):
        """A request of this side, made while a call is running."""
        self.send(ask=what, **details)
        answer = self.receive()
        if "raised" in answer:
            name, text = answer["raised"]
            from attention_lib import OnChipOverflow

            known = (ValueError, TypeError, IndexError, MemoryError, OnChipOverflow)
            raise {k.__name__: k for k in known}.get(name, RuntimeError)(text)
        return answer.get("answer")

    def special(self, value, encode):
        HBM, Tensor = self.hbm_types
        if isinstance(value, HBM):
            return {"$": "hbm", "id": value.id}
        if isinstance(value, Tensor):
            return {"$": "tensor", "id": value.id}
        if isinstance(value, self.made):
            of = [encode(x) for x in value.arguments]
            return {"$": "made", "module": value.module, "function": value.function, "of": of}
        if callable(value) and not hasattr(value, "__array__"):
            self.functions.append(value)
            name = getattr(value, "__name__", type(value).__name__)
            return {"$": "function", "id": len(self.functions) - 1, "name": str(name)[:60]}
        return None

    def from_grader(self, kind, item, decode):
        HBM, Tensor = self.hbm_types
        if kind == "hbm":
            id = item["id"]
            return self.memories.setdefault(id, HBM(id, decode(item["budget"])))
        if kind == "tensor":
            hbm = self.memories[item["hbm"]]
            return Tensor(item["id"], hbm, item["name"], item["shape"], item["dtype"])
        if kind == "object":
            module = importlib.import_module(item["module"])
            return getattr(module, item["class"])(**decode(item["fields"]))
        if kind == "spy":
            import numpy as np

            namespace = {"np": np}
            exec(item["source"], namespace)
            array = decode(item["array"]).view(namespace[item["class"]])
            self.spies[item["id"]] = array.log = []
            return array
        raise KeyError(kind)

    def serve(self):
        self.send(ready=True)
        while True:
            message = self.receive()
            reply = getattr(self, "do_" + message.pop("do"))(**message)
            self.send(**reply)

    def keep_traceback(self, kind, error, lines):
        """IPython would print it; it goes with the error instead."""
        self.traceback = "\n".join(lines)

    def do_cell(self, source):
        printed, self.traceback = Printed(), ""
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            try:
                result = self.shell.run_cell(source, store_history=False)
                error = result.error_before_exec or result.error_in_exec
            except BaseException as raised:  # KeyboardInterrupt, or what went wrong in IPython
                error = raised
        said = None
        if error is not None:
            said = [type(error).__name__[:60], str(error)[:500], str(self.traceback)[:10_000]]
        return {"printed": printed.text(), "error": said}

    def do_value(self, expression):
        try:
            return {"value": eval(expression, self.shell.user_ns)}
        except BaseException as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def do_call(self, function, arguments, positional, watch, measure, sealed_but, seconds):
        """positional: how many of the arguments, the first ones, go without their names."""
        self.spies = {}
        function = self.functions[function]
        first, rest = list(arguments)[:positional], list(arguments)[positional:]

        def called(**given):
            if measure:
                self.ask("begin")
            try:
                return function(*(given[k] for k in first), **{k: given[k] for k in rest})
            finally:
                if measure:
                    self.ask("end")

        printed = Printed()
        seal = sealed(sealed_but) if sealed_but is not None else contextlib.nullcontext({})
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), seal as made:
            seen = self.judge.observe(
                called, arguments, watch_library=watch, measure=measure, seconds=seconds
            )
        library = {name.split(".<locals>")[0] for name in seen.library}
        library |= {name for name, error in made.items() if error.__traceback__ is not None}
        for error in made.values():
            error.__traceback__ = None
        return {
            "value": seen.value, "error": seen.error, "timed_out": seen.timed_out,
            "mutated": seen.mutated, "library": sorted(library), "peak": seen.peak,
            "logs": {id: list(log) for id, log in self.spies.items()},
        }  # fmt: skip


def main():
    settings = json.loads(sys.argv[1])
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    settle(settings)
    sys.path[:0] = [str(HERE), settings["library"]]
    import numpy as np

    worker = Worker(requests, replies)
    sys.path.insert(0, "")  # as in a notebook: the student's own modules
    np.ones((600, 600)) @ np.ones((600, 600))  # the buffers of the matrix product, once
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    worker.serve()


if __name__ == "__main__":
    main()
