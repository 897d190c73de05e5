"""Functions with gaps: worked code from which some lines are missing.

    @gaps("old", "O_sum")
    def flash_attention(...):       # the lines that make `old` and `O_sum` are for the learner

As it comes, such a function would stop with a NameError in its middle. Here it returns None as
long as every gap is open, which a check reports as "not attempted".
"""

import functools


def gaps(*names):
    """Decorate a function whose lines that assign these names are still to be written.

    Called with all gaps open it returns None. With some of them open it raises NameError, which
    says which one; with none it is the function itself.
    """

    def decorate(function):
        code = function.__code__
        missing = [n for n in names if n not in code.co_varnames + code.co_cellvars]

        @functools.wraps(function)
        def call(*args, **kwargs):
            if len(missing) == len(names):
                return None
            if missing:
                raise NameError(f"no line makes {missing[0]} yet: fill that gap too")
            return function(*args, **kwargs)

        return call

    return decorate
