"""Prints a job template for a scheduler: `python -m tfopt.distribute.template kubernetes > job.yaml`."""

import argparse
import sys
from collections.abc import Sequence
from importlib.resources import files

from tfopt.errors import unknown_name

FILES = {"slurm": "slurm.sh", "kubernetes": "kubernetes.yaml", "jobset": "jobset.yaml", "ray": "ray.py"}


def template(name: str) -> str:
    """Returns the job template for "slurm", "kubernetes", "jobset" or "ray"; raises ValueError for another name."""
    if name not in FILES:
        raise unknown_name("template", name, FILES)
    return (files("tfopt.distribute") / "templates" / FILES[name]).read_text(encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tfopt.distribute.template",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Prints a job template, with comments where you must fill in your site's values.",
        epilog="save it to a file, then:\n"
        "  slurm       a batch script:   sbatch slurm.sh python train.py\n"
        "  kubernetes  a manifest:       kubectl apply -f job.yaml\n"
        "  jobset      the same for JobSet: kubectl apply -f jobset.yaml\n"
        "  ray         a Python script:  ray job submit --working-dir . -- python training.py\n\n"
        "exit codes: 0 printed, 2 wrong usage",
    )
    parser.add_argument("name", metavar="{" + ",".join(FILES) + "}", help="the scheduler")
    try:
        sys.stdout.write(template(parser.parse_args(arguments).name))
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
