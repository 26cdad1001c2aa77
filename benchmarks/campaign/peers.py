"""What PyTorch's scripts measured: which lines still count, and which are missing."""

import datetime

SCRIPTS = ("resnet50", "gpt2")
VARIANTS = tuple(f"{how}, {feeding}" for how in ("eager", "compiled") for feeding in ("resident", "pinned"))
_FRESH = datetime.timedelta(days=1)


def fresh(records, now=None):
    """The lines that may stand beside what is measured now, the last of each part and variant.

    They are of the same torch, driver and device as the newest line, and less than a day old.
    """
    lines = [record for record in records if "samples_ms" in record]
    now = now or datetime.datetime.now().astimezone()
    young = [line for line in lines if now - datetime.datetime.fromisoformat(line["at"]) < _FRESH]
    same = [line for line in young if _setting(line) == _setting(young[-1])]
    return list({(line["part"], line["workload"], line["variant"]): line for line in same}.values())


def missing(records, part, machine):
    """The variants of which a part has no line that was measured on this machine and still counts."""
    setting = ((machine["torch"] or "").split("+")[0], machine["driver"])
    found = {line["variant"] for line in fresh(records) if line["part"] == part and _setting(line)[:2] == setting}
    return [variant for variant in VARIANTS if variant not in found]


def _setting(line):
    # torch's own version may carry its build, as in 2.11.0+cu130, which the package's does not.
    return line["torch"].split("+")[0], line["driver"], line["device"]
