"""NCCL's settings: read for the record, and never set."""

from collections.abc import Mapping


def nccl_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment's NCCL variables by name, to be kept beside a measurement.

    Example:
        >>> nccl_variables({"NCCL_DEBUG": "INFO", "HOME": "/root"})
        {'NCCL_DEBUG': 'INFO'}
    """
    return {name: environ[name] for name in sorted(environ) if name.startswith("NCCL_")}
