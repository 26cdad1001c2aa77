"""Prints a job template for a scheduler: `python -m tfopt.distribute.template kubernetes > job.yaml`."""

import argparse
import sys
from collections.abc import Sequence
from importlib.resources import files

from tfopt.errors import unknown_name

FILES = {"slurm": "slurm.sh", "kubernetes": "kubernetes.yaml", "ray": "ray.py"}


def template(name: str) -> str:
    """Returns a job template, with comments where a site must fill in.

    Args:
        name: "slurm", "kubernetes" or "ray".

    Raises:
        ValueError: If there is no such template.
    """
    if name not in FILES:
        raise unknown_name("template", name, FILES)
    return (files("tfopt.distribute") / "templates" / FILES[name]).read_text(encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tfopt.distribute.template",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Prints a job template, with comments where your site must fill in.",
        epilog="what to do with it, in a file:\n"
        "  slurm       a batch script:   sbatch slurm.sh python train.py\n"
        "  kubernetes  a manifest:       kubectl apply -f job.yaml\n"
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
