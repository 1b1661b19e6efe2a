"""Benchmarks behind every number in README and docs: `make bench` writes benchmarks/results/*.csv.

`docs/benchmarks.md` lists the benchmarks of `benchmarks.run.BENCHMARKS` and the scripts for development. They
do not see what earlier commands or the explorer stored in the user's folders: results of the bundled sample
would be found there instead of measured.
"""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

_folder = tempfile.mkdtemp(prefix="inshrink-benchmarks-")
atexit.register(shutil.rmtree, _folder, ignore_errors=True)
for _name in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
    os.environ[_name] = str(Path(_folder) / _name.lower())
