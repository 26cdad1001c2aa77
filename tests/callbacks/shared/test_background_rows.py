import json
import threading

from tfopt.callbacks.shared import row_files as rows
from tfopt.callbacks.shared.row_files import BackgroundRows


def test_writing_waits_for_no_disk(tmp_path, monkeypatch):
    may_go_on, append = threading.Event(), rows.RowWriter.write

    def hangs(self, *arguments, **options):
        assert may_go_on.wait(20)
        append(self, *arguments, **options)

    monkeypatch.setattr(rows.RowWriter, "write", hangs)
    writer = BackgroundRows(tmp_path, "pace", ("jsonl",), ("time_seconds", "step"))
    for step in range(100):
        writer.write({"time_seconds": 0.0, "step": step}, step=step)
    assert not (tmp_path / "pace.jsonl").read_text()
    may_go_on.set()
    writer.close()
    lines = (tmp_path / "pace.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(100))
    writer.write({"time_seconds": 0.0, "step": 100})
    assert len((tmp_path / "pace.jsonl").read_text().splitlines()) == 100
