"""Benchmarks: `python -m benchmarks.NAME --json FILE` prints a table and writes it. Each docstring says what is timed.

Importing this package sets one torch thread, as the platform's roles have on two cores, before torch is imported.
"""

import os

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"
