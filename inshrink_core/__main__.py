"""Run the command line as ``python -m inshrink_core``; under ``torchrun`` each process does its part."""

import sys

from inshrink_core.cli import main

if __name__ == "__main__":
    # `main` removes the working directory from the import path before it imports anything else.
    sys.exit(main())
