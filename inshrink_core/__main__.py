"""Run the command line as ``python -m inshrink_core``; under ``torchrun`` every process takes its part."""

import sys

from inshrink_core.cli import main

if __name__ == "__main__":
    # The command line makes itself a safe import path before it imports anything else.
    sys.exit(main())
