import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf
from versions import since_tensorflow

from tfopt.errors import UnsupportedError
from tfopt.xla import autotune_cache, persistent_cache, xla_flags
from tfopt.xla.autotune_cache import share_cache
from tfopt.xla.xla_flags import parse

pytestmark = since_tensorflow("2.20")  # whose XLA says which flags it knows

BUILD = f"tensorflow-{tf.version.VERSION}-{tf.version.GIT_VERSION}"


@pytest.fixture(autouse=True)
def _early(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")  # or what is set in the test would outlast it
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setattr(xla_flags, "devices_started", lambda: False)
    monkeypatch.setattr(xla_flags, "_set_in_time", None)
    monkeypatch.setattr(autotune_cache, "gpus", lambda: ())


def test_the_flags_name_a_folder_of_this_build(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=2")
    cache = persistent_cache(tmp_path / "my cache")
    assert cache.folder == tmp_path / "my cache" / BUILD
    assert cache.folder.is_dir()
    assert list(cache.folder.iterdir()) == []
    assert parse(os.environ["XLA_FLAGS"]) == {
        "xla_gpu_autotune_level": "2",
        "xla_gpu_per_fusion_autotune_cache_dir": str(cache.folder),
        "xla_gpu_experimental_autotuner_cache_dir": str(cache.folder),
    }
    assert persistent_cache(tmp_path / "my cache") == cache


def test_it_says_what_it_does_without_a_gpu(tmp_path, monkeypatch):
    cache = persistent_cache(tmp_path)
    assert str(cache) == f"XLA would keep autotuning results in {cache.folder}; without a GPU it autotunes nothing"
    assert json.loads(json.dumps(cache.to_dict())) == {"folder": str(cache.folder), "used": False}
    monkeypatch.setattr(autotune_cache, "gpus", lambda: ("a GPU",))
    assert str(persistent_cache(tmp_path)) == f"XLA keeps autotuning results in {cache.folder}"


def test_a_relative_folder_holds_when_the_process_moves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert persistent_cache("cache").folder == tmp_path / "cache" / BUILD
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert persistent_cache("~/cache").folder == tmp_path / "home" / "cache" / BUILD


def test_a_folder_that_cannot_be_made_or_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UnsupportedError, match=r"Expected a writable folder\. Found: .*file.*Pass another"):
        persistent_cache(tmp_path / "file")

    def refuse(dir):
        raise PermissionError(f"Permission denied: {dir}")

    monkeypatch.setattr(autotune_cache.tempfile, "TemporaryFile", refuse)
    with pytest.raises(UnsupportedError, match="Permission denied"):
        persistent_cache(tmp_path / "read-only")
    assert "XLA_FLAGS" not in os.environ


def test_too_late(tmp_path, monkeypatch):
    monkeypatch.setattr(xla_flags, "devices_started", lambda: True)
    with pytest.raises(UnsupportedError, match="Found: they have started"):
        persistent_cache(tmp_path / "new" / "cache")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("folder", "error"),
    [
        (None, TypeError),
        (5, TypeError),
        (b"x", TypeError),
        ("", ValueError),
        ("a\0b", ValueError),
        ("~nouser/x", ValueError),
    ],
)
def test_what_is_no_folder(folder, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=r"Expected .* folder.*\. Received: .*\. (Pass|Write)"):
        persistent_cache(folder)
    assert list(tmp_path.iterdir()) == []


def test_only_flags_that_xla_knows_are_set(tmp_path, monkeypatch):
    monkeypatch.setattr(
        autotune_cache, "_FLAGS", ("xla_gpu_per_fusion_autotune_cache_dir", "xla_gpu_a_later_cache_dir")
    )
    persistent_cache(tmp_path)
    assert parse(os.environ["XLA_FLAGS"]).keys() == {"xla_gpu_per_fusion_autotune_cache_dir"}
    monkeypatch.setattr(autotune_cache, "_FLAGS", ("xla_gpu_a_later_cache_dir",))
    with pytest.raises(UnsupportedError, match="Found: the installed one does not"):
        persistent_cache(tmp_path)


def test_child_processes_share_one(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert share_cache() is None  # without a GPU
    assert "XLA_FLAGS" not in os.environ
    monkeypatch.setattr(autotune_cache, "gpus", lambda: ("a GPU",))
    cache = share_cache()
    assert cache.folder == tmp_path / "tfopt" / "xla" / BUILD
    assert str(cache.folder) in os.environ["XLA_FLAGS"]
    before = os.environ["XLA_FLAGS"]
    assert share_cache(tmp_path / "another") == cache
    assert os.environ["XLA_FLAGS"] == before


def test_without_a_cache_child_processes_do_without(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(autotune_cache, "gpus", lambda: ("a GPU",))
    monkeypatch.setattr(autotune_cache, "_FLAGS", ("xla_gpu_a_later_cache_dir",))
    assert share_cache(tmp_path / "new") is None
    assert list(tmp_path.iterdir()) == []
    assert "XLA keeps no autotuning results" in caplog.text


@pytest.mark.gpu
def test_a_second_process_finds_what_the_first_kept(tmp_path):
    """Counted, not timed: what is autotuned a second time would be written again."""
    script = f"""
import tfopt
print(tfopt.xla.persistent_cache({str(tmp_path)!r}).folder)
import tensorflow as tf
step = tf.function(lambda x: tf.nn.relu(x @ x), jit_compile=True)
step(tf.ones((512, 512), tf.bfloat16))
"""
    kept = []
    for _ in range(2):
        output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
        folder = Path(output.splitlines()[-1])
        kept.append({(file.name, file.stat().st_mtime_ns) for file in folder.iterdir()})
    assert kept[0]
    assert kept[0] == kept[1]
