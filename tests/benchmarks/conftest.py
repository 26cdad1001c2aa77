import sys
from pathlib import Path

# As the scripts there find each other.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
