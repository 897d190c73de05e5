"""The kinds of exercise: a choice, a number, a program."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Choice:
    """One right option; every option, the right one too, has a remark that teaches."""

    id: str
    text: str
    options: Mapping[str, str]  # letter -> text
    right: str
    remarks: Mapping[str, str]  # letter -> what to say to somebody who chose it

    def __post_init__(self):
        if self.right not in self.options or set(self.remarks) != set(self.options):
            raise ValueError(
                f"{self.id}: every option needs a remark, and the right one must exist"
            )


@dataclass(frozen=True)
class Number:
    """A prediction. The truth is computed when asked, by the library, never written down.

    slips: name of a mistake -> (the number that it gives, what to say). The number is computed
    too, so that a slip stays the slip when the library changes.
    """

    id: str
    text: str
    unit: str
    truth: Callable[[], float]
    why: str  # said with a right answer
    hint: str  # said with an unknown wrong one
    slips: Mapping[str, tuple[Callable[[], float], str]] = field(default_factory=dict)
    tolerance: float = 0.02  # relative, of a right answer
    slip_tolerance: float = 0.01  # of a slip; a count is exact, a rounded ratio is not


@dataclass(frozen=True)
class Probe:
    """One small input on which a program is run, in words and as arguments."""

    says: str  # "N = 7, d = 4, Br = 3: the maximum rises by 40 along the row"
    arguments: Mapping[str, object]  # parameter name -> value
    tolerance: tuple[float, ...]  # for each output: what rounding may do to it
    stage: int = 0  # a mistake is looked for up to the first stage that fails, and not beyond


@dataclass(frozen=True)
class Mistake:
    """A wrong idea that people really have, as a program, and what to tell them.

    program takes the same arguments as the right one. says: what is wrong, in one sentence.
    read: where the notebooks show it.
    """

    id: str
    program: Callable
    says: str
    read: str


@dataclass(frozen=True)
class Program:
    """An exercise whose answer is a function.

    probes(seed) gives the inputs, hostile ones among them; right computes the expected outputs in
    float64. library: which of our functions the answer may call. memory(arguments): bytes that the
    answer may allocate on big(seed), or None for no such claim. claims: further checks, each
    claim(answer) -> None, or (misconception, what is wrong, where to read).
    """

    id: str
    text: str
    outputs: tuple[str, ...]
    right: Callable
    probes: Callable[[int], list[Probe]]
    mistakes: tuple[Mistake, ...]
    read: str
    library: frozenset = frozenset()
    big: Callable[[int], Mapping[str, object]] | None = None
    memory: Callable[[Mapping[str, object]], int] | None = None
    claims: tuple[Callable, ...] = ()
