"""The templates as the command prints them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tfopt.distribute.template import FILES, main
from tfopt.distribute.watchdog.training_process import Intervals

ROOT = Path(__file__).parents[2]


class TestTheCommand:
    @pytest.mark.parametrize("name", FILES)
    def test_prints_the_file(self, name, capsys):
        assert main([name]) == 0
        text = (ROOT / "tfopt" / "distribute" / "templates" / FILES[name]).read_text(encoding="utf-8")
        assert capsys.readouterr().out == text
        assert max(map(len, text.splitlines())) <= 120

    def test_there_is_a_template_for_every_name_and_no_other(self):
        found = {file.name for file in (ROOT / "tfopt" / "distribute" / "templates").iterdir() if file.is_file()}
        assert found == set(FILES.values())

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (
                ["kubernets"],
                "Expected a template: 'slurm', 'kubernetes', 'jobset' or 'ray'. Received: 'kubernets'. Did you mean",
            ),
            ([], "required: {slurm,kubernetes,jobset,ray}"),
            (["ray", "slurm"], "slurm"),
        ],
    )
    def test_wrong_usage(self, arguments, said, capsys):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert said in err

    @pytest.mark.parametrize("name", FILES)
    def test_a_worker_without_progress_is_restarted_after_an_hour(self, name, capsys):
        main([name])
        variable = r"^\s*(export |- name: |os\.environ\.setdefault\(\")TFOPT_WATCH_PROGRESS_SECONDS\b.*\n?.*\b3600\b"
        assert re.search(variable, capsys.readouterr().out, re.MULTILINE)
        assert Intervals.from_environ({"TFOPT_WATCH_PROGRESS_SECONDS": "3600"}) == Intervals(progress_seconds=3600)

    def test_loads_nothing_heavy(self):
        heavy = ("tensorflow", "keras", "numpy", "ray", "yaml", "pynvml")
        code = (
            f"from tfopt.distribute.template import main; main(['ray']); import sys; print({heavy!r}, file=sys.stderr);"
        )
        code += f"sys.exit(bool([each for each in {heavy!r} if each in sys.modules]))"
        assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).returncode == 0
