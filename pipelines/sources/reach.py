"""What each kind of source can do: the one table that errors and docs/sources.md are made of."""

from tfopt.pipelines.sources.source import Source

ABILITIES = {
    "position": "reads by position, as `balance` does",
    "begin": "begins in mid-epoch and reads nothing before",
    "split": "`split`, several processes",
    "part": "each process reads its part alone",
    "pack": "`pack`",
    "cache": "cache on disk without `cache_key`",
    "service": "tf.data service",
}

_BY_NUMBER = "position begin split part cache service"
_STREAMED = "split part cache service"

REACH = {
    kind: frozenset(abilities.split())
    for kind, abilities in {
        "arrays": _BY_NUMBER,
        ".npy files": _BY_NUMBER,
        "images, masks and files": _BY_NUMBER,
        "tables in memory": _BY_NUMBER,
        "lines": _BY_NUMBER,
        "tar files": _BY_NUMBER,
        "tokens": f"{_BY_NUMBER} pack",
        "records of 32 KiB and more": _BY_NUMBER,
        "smaller records": _STREAMED,
        "compressed records": _STREAMED,
        "larger Parquet files": "begin split part cache",
        "HDF5": "split part cache",
        "tensorflow-datasets": "split part cache",
        "`tf.data.Dataset`": "split service",
        "`PyDataset`": "begin",
        "other loaders": "",
    }.items()
}
"""The abilities of each kind of source."""


def abilities(source: Source) -> frozenset[str]:
    """Returns what a source can do, but for a tf.data service, which also depends on the functions in its datasets."""
    has = {
        "position": source.at is not None and not source.batched,
        "begin": source.at is not None or source.pools is not None,
        "split": not source.batched and not source.changes,
        "part": source.part is not None,
        "pack": source.packed is not None,
        "cache": source.fingerprint is not None,
    }
    return frozenset(ability for ability, is_there in has.items() if is_there)


def those_with(ability: str) -> str:
    """Returns the kinds of sources that have an ability, for errors: "arrays, .npy files or HDF5"."""
    *kinds, last = [kind for kind, has in REACH.items() if ability in has]
    return f"{', '.join(kinds)} or {last}" if kinds else last


def as_markdown() -> str:
    """Returns the table as docs/sources.md has it."""
    rows = [["source", *ABILITIES.values()], ["---", *[":-:"] * len(ABILITIES)]]
    rows += [[kind, *("✓" if ability in has else "" for ability in ABILITIES)] for kind, has in REACH.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
