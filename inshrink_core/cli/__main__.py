"""Run the command line as ``python -m inshrink_core.cli``."""

import sys

from inshrink_core.cli import main

if __name__ == "__main__":
    sys.exit(main())
