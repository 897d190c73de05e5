"""Settings for the library's tests. What holds for notebooks too is in ../conftest.py."""

import matplotlib
from hypothesis import settings

matplotlib.use("Agg")  # here, not in the environment: the notebooks' kernels draw inline

# A loaded two-core machine is no reason to fail: no time limit on an example.
settings.register_profile("course", deadline=None, print_blob=True)
settings.load_profile("course")
