"""`python -m tfopt.bench` is `tfopt-bench`."""

import sys

from tfopt.bench.cli import main

if __name__ == "__main__":  # the processes of the cases load this module, too
    sys.exit(main())
