"""Results from machines that a learner need not have, as JSON, each with where it is from.

A recording names the device, driver, versions, date and command; a test refuses one whose script
has changed since. Whatever shows a recording says that it is one.
"""

import json
from importlib import resources


def recording(name):
    """The recording with this name (a file name without .json) as a dict.

    Raises ValueError for a name that is not there.
    """
    files = resources.files(__name__)
    names = sorted(
        f.name.removesuffix(".json") for f in files.iterdir() if f.name.endswith(".json")
    )
    if name not in names:
        raise ValueError(f"name is {name!r}; accepted: {', '.join(names)}")
    return json.loads((files / f"{name}.json").read_text(encoding="utf-8"))


def said(record):
    """One sentence that says what was recorded where: to print beside the numbers."""
    return (
        f"Recorded on one {record['device']}, {record['date']}, driver {record['driver']}, "
        f"torch {record['torch']}, by: {record['command']}"
    )
