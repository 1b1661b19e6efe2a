"""Benchmarks behind every number in README and docs: `make bench` writes benchmarks/results/*.csv.

Those of `benchmarks.run.BENCHMARKS` are for everybody; `docs/benchmarks.md` lists them, what development
uses, and what both share.

They begin without anything that earlier commands or the explorer have left in the user's folders: results of
the bundled sample lie there, and would be found instead of measured.
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
