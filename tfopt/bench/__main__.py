"""`python -m tfopt.bench` is `tfopt-bench`."""

import sys

from tfopt.bench.cli import main

sys.exit(main())
