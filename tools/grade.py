"""Grade a class: FOLDER/STUDENT/EXERCISE.ipynb in, scores and feedback out.

    python tools/grade.py FOLDER                    all exercises that anybody handed in
    python tools/grade.py FOLDER --grades OUT       default: grades/
    python tools/grade.py FOLDER --exercise ex01_online_softmax

OUT/scores.csv has one line for each student and check, OUT/feedback/STUDENT/EXERCISE.html what the
student may see, OUT/gradebook.db and the folders beside it are an nbgrader course.

The student's code runs in a process of its own, isolated with bubblewrap where that exists; the
last line says whether it was. The checks run here, on values, with fresh inputs: the same for the
whole class, and again with --seed.
"""

import argparse
import collections
import csv
import multiprocessing
import os
import secrets
import statistics
import sys
import tempfile
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
for _threads in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_threads, "1")

COLUMNS = ("student", "exercise", "check", "status", "misconception", "points", "max", "note")
TRIES = 2  # for a submission in whose company the grader's own process ended


def cores():
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def arguments(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="FOLDER/STUDENT/EXERCISE.ipynb")
    parser.add_argument("--grades", type=Path, default=ROOT / "grades")
    parser.add_argument("--exercise", action="append", help="only this one (may be repeated)")
    parser.add_argument("--solutions", type=Path, default=ROOT / "solutions")
    parser.add_argument("--jobs", type=int, default=min(8, cores()), help="submissions at a time")
    parser.add_argument("--seed", type=int, help="of the checks' inputs; default: a fresh one")
    parser.add_argument("--cell-seconds", type=float, default=20.0)
    parser.add_argument("--call-seconds", type=float, default=10.0)
    parser.add_argument("--total-seconds", type=float, default=120.0)
    parser.add_argument("--memory-mib", type=int, default=2048)
    parser.add_argument("--no-isolation", action="store_true", help="even where bubblewrap works")
    return parser.parse_args(argv)


class Class:
    """One run: who handed in what, and what came of it."""

    def __init__(self, options):
        from tools.grading import bookkeeping, judge, sandbox, submissions

        self.options = options
        self.bookkeeping, self.judge, self.submissions = bookkeeping, judge, submissions
        self.solutions = {p.stem: p for p in sorted(options.solutions.glob("*.ipynb"))}
        self.seed = secrets.randbelow(2**32) if options.seed is None else options.seed
        self.rows, self.seconds, self.peaks, self.pages = [], [], [], 0
        limits = sandbox.Limits(
            cell=options.cell_seconds,
            call=options.call_seconds,
            total=options.total_seconds,
            memory=options.memory_mib * 2**20,
        )
        from tools.exercises import helpers, read

        hide = (options.folder, options.grades)
        put_together = set().union(*(helpers(read(p)) for p in self.solutions.values()))
        self.sandbox = sandbox.Sandbox(limits, not options.no_isolation, hide, put_together)

    def run(self):
        found = self.submissions.find(self.options.folder, self.solutions)
        wanted = set(self.options.exercise or (s.exercise for s in found))
        used = [name for name in self.solutions if name in wanted]
        self.course = self.bookkeeping.Course(self.options.grades)
        releases = {name: self.course.register(self.solutions[name]) for name in used}
        todo = []
        for s in found:
            if s.problem:
                if not self.options.exercise:
                    self.row(s.student, s.exercise, status="not graded", note=s.problem)
            elif s.exercise in releases:
                todo.append(s)
        for student in self.submissions.students(self.options.folder):
            there = {s.exercise for s in todo if s.student == student}
            for name in used:
                if name not in there:
                    self.missing(student, name, releases[name])
        with self.sandbox:
            self.grade(todo, releases)
        self.write()

    def grade(self, todo, releases):
        from tqdm import tqdm

        waiting = collections.deque((s, TRIES) for s in todo)
        with tqdm(total=len(todo), unit="submission", disable=None) as bar:
            while waiting:
                waiting = self.pool(waiting, releases, bar)

    def pool(self, waiting, releases, bar):
        """Grade what waits; returns what has to be tried again because a process of ours ended."""
        context = multiprocessing.get_context("spawn")
        slots = context.Queue()
        for slot in range(self.options.jobs):
            slots.put(slot)
        again, running = collections.deque(), {}
        with ProcessPoolExecutor(
            self.options.jobs, context, self.judge.prepare, (self.sandbox, slots)
        ) as pool:
            try:
                while waiting or running:
                    while waiting and len(running) < self.options.jobs + 1:
                        s, tries = waiting[0]
                        try:
                            job = self.start(pool, s, releases[s.exercise])
                        except BrokenProcessPool:
                            raise
                        except Exception as error:
                            self.failed(s, releases[s.exercise], error, bar)
                        else:
                            running[job.future] = (s, tries, job)
                        waiting.popleft()
                    done = wait(running, return_when=FIRST_COMPLETED).done
                    for future in done:
                        s, tries, job = running.pop(future)
                        try:
                            graded = future.result()
                        except BrokenProcessPool:
                            running[future] = (s, tries, job)
                            raise
                        self.end(s, job, graded, releases[s.exercise], bar)
            except BrokenProcessPool:
                for s, tries, job in running.values():
                    job.clean()
                    if tries > 1:
                        again.append((s, tries - 1))
                    else:
                        why = "the grader's own process ended, twice"
                        self.end(s, job, job.stopped(why), releases[s.exercise], bar)
                again.extend(waiting)
        return again

    def start(self, pool, s, release):
        """Read a submission, put the checks back, and hand it to a process."""
        from tools.exercises import Refused

        problem = None
        try:
            cells = self.submissions.read(s.path)
        except self.submissions.Unreadable as reason:
            cells, problem = [], str(reason)
        nb, notes = self.submissions.align(cells, release)
        try:
            nb = self.course.put_back(nb, s.student, s.exercise)
        except Refused as reason:
            nb, notes = self.submissions.align([], release)
            nb, problem = self.course.put_back(nb, s.student, s.exercise), str(reason)
        job = Job(self, nb, [] if problem else notes, self.bookkeeping.cells(nb))
        if problem:
            job.future = _Done(job.stopped(problem))
            return job
        job.files = Path(tempfile.mkdtemp(prefix="course-submission-"))
        self.submissions.copy_files(s.path.parent, job.files)
        try:
            job.future = pool.submit(self.judge.grade_here, job.cells, job.files, self.seed)
        except BrokenProcessPool:
            job.clean()
            raise
        return job

    def end(self, s, job, graded, release, bar):
        try:
            self.finish(s, job, graded)
            bar.update()
        except Exception as error:
            self.failed(s, release, error, bar)

    def failed(self, s, release, error, bar):
        """Something of ours went wrong with one submission: the others go on."""
        note = f"the grader failed: {type(error).__name__}: {error}"
        for id, most in self.checks_of(release):
            self.row(s.student, s.exercise, id, "not graded", "", 0, most, note)
        bar.update()

    def finish(self, s, job, graded):
        """Save what came of a submission, and its rows."""
        job.clean()
        points = self.course.save(job.nb, graded, s.student, s.exercise)
        self.pages += 1
        if graded.seconds:
            self.seconds.append(graded.seconds)
            self.peaks.append(graded.peak)
        for c in graded.checked:
            got, most, by_hand = points[c.grade_id]
            own = [n for n in job.notes if f" {c.grade_id} " in n or n.startswith("cell ")]
            if c.status != self.judge.PASSED:
                text = c.message.removeprefix(f"[{c.status}] ").removeprefix(f"{c.grade_id}: ")
                text = text.removeprefix("not graded: ")
                own.append(" ".join(text.split()))
            if by_hand == "marked":
                own.append("the points were given by hand")
            note = "; ".join(own + graded.notes)
            self.row(s.student, s.exercise, c.grade_id, c.status, c.misconception, got, most, note)
        for id in self.bookkeeping.written(job.nb):
            got, most, by_hand = points[id]
            self.row(s.student, s.exercise, id, by_hand or "not attempted", "", got, most,
                     "a written answer")  # fmt: skip

    def missing(self, student, name, release):
        for id, most in self.checks_of(release):
            self.row(student, name, id, "missing", "", 0, most, "nothing was handed in")

    def checks_of(self, release):
        """[(grade id, points)] of an exercise."""
        graded = [c.metadata.nbgrader for c in release.cells if "nbgrader" in c.metadata]
        return [(about.grade_id, about.points) for about in graded if about.grade]

    def row(self, student, exercise, check="", status="", misconception="", points=0, most=0,
            note=""):  # fmt: skip
        words = (student, exercise, check, status, misconception)
        self.rows.append((*map(plain, words), f"{points:g}", f"{most:g}", plain(note)[:500]))

    def write(self):
        path = self.options.grades / "scores.csv"
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            writer.writerows(sorted(self.rows))

    def summary(self):
        box = self.sandbox
        counts = collections.Counter(row[3] for row in self.rows)
        said = ", ".join(f"{n} {status}" for status, n in counts.most_common())
        time = f"{statistics.median(self.seconds):.1f} s" if self.seconds else "no time"
        peak = max(self.peaks, default=0) / 2**20
        isolated = "on" if box.isolated else f"OFF ({box.reason})"
        return (
            f"{len(self.rows)} lines in {self.options.grades / 'scores.csv'}: {said or 'nothing'}\n"
            f"{self.pages} feedback pages; a submission took {time} (median) and at most "
            f"{peak:.0f} MiB; seed {self.seed}\n"
            f"isolation of the students' code: {isolated}"
        )


class Job:
    """A submission on its way."""

    def __init__(self, run, nb, notes, cells):
        self.run, self.nb, self.notes, self.cells = run, nb, notes, cells
        self.files, self.future = None, None

    def stopped(self, why):
        """What comes of it when nothing can be run."""
        graded = self.run.judge.Graded()
        for kind, *cell in self.cells:
            if kind == "checks":
                checked = self.run.judge.Checked(cell[0], "not graded", f"not graded: {why}")
                graded.checked.append(checked)
        return graded

    def clean(self):
        if self.files is not None:
            self.run.submissions.remove(self.files)
            self.files = None


def _Done(result):
    from concurrent.futures import Future

    future = Future()
    future.set_result(result)
    return future


def plain(text):
    """Text that a spreadsheet does not take for a formula, on one line."""
    text = " ".join(str(text).encode("utf-8", "replace").decode().split())
    return "'" + text if text[:1] in ("=", "+", "-", "@") else text


def main(argv=None):
    options = arguments(argv)
    if not options.folder.is_dir():
        print(f"there is no folder {options.folder}", file=sys.stderr)
        return 2
    try:
        from tools.exercises import Refused
        from tools.grading import bookkeeping  # noqa: F401
    except ModuleNotFoundError as missing:
        print(f"grading needs {missing.name}: pip install -e '.[grade]'", file=sys.stderr)
        return 2
    run = Class(options)
    if not run.solutions:
        print(f"there is no solution in {options.solutions}", file=sys.stderr)
        return 2
    try:
        run.run()
    except Refused as reason:
        print(reason, file=sys.stderr)
        return 2
    print(run.summary())
    return 0


if __name__ == "__main__":
    sys.exit(main())
