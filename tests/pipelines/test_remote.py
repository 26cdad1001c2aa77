"""`fetch`: copies equal the files, whatever the server does; nothing half fetched is ever read."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest
from file_server import serving
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFile

from tfopt.errors import PipelineError
from tfopt.pipelines import (
    build_pipeline,
    fetch,
    hdf5,
    images,
    lines,
    npy,
    records,
    remote,
    table,
)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(remote, "_PAUSES", [0.002 * 2**number for number in range(7)])
    monkeypatch.setattr(remote, "_STALLED", 0.3)
    monkeypatch.setattr(remote, "_LARGE", 2500)


@pytest.fixture
def server(tmp_path):
    """A server of a folder of files, of which one counts as large and two are in a subfolder."""
    folder = tmp_path / "served"
    (folder / "more").mkdir(parents=True)
    random_bytes = np.random.default_rng(0).bytes
    for name, size in {"a-0": 3500, "a-1": 1000, "a-2": 0, "b": 1, "more/c": 2000, "more/d e": 999}.items():
        (folder / name).write_bytes(random_bytes(size))
    with serving(folder) as server:
        yield server


def contents(folder):
    paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def gets(server):
    return Counter(path for method, path, _ in server.requests if method == "GET")


@pytest.mark.parametrize("at_once", [128, 2])
def test_a_folder_is_copied_once_and_then_what_differs(server, tmp_path, monkeypatch, at_once):
    """Of many files the answer to the one request tells their state, which later calls compare."""
    monkeypatch.setattr(remote, "_AT_ONCE", at_once)
    copy = Path(fetch(server.url, tmp_path / "copies"))

    def fetched():
        """What else than the listing the next call asks for."""
        server.requests.clear()
        assert fetch(server.url, tmp_path / "copies") == str(copy)
        assert contents(copy) == contents(server.folder)
        return set(gets(server)) - {"/", "/more/"}

    assert contents(copy) == contents(server.folder)
    assert gets(server) == dict.fromkeys(["/", "/more/", *(f"/{name}" for name in contents(copy))], 1)
    if at_once == 2:
        assert [path for method, path, _ in server.requests if method == "HEAD"] == ["/a-0"]  # large: looked at again
    assert fetched() == set()
    (server.folder / "b").write_bytes(b"new")
    (server.folder / "more" / "c").unlink()
    assert fetched() == {"/b"}
    os.truncate(copy / "a-0", 3499)
    (copy / "a-1").write_bytes(bytes(1000))  # as a kill between a copy and its stamp leaves one
    (copy / "b").unlink()
    assert fetched() == {"/a-0", "/a-1", "/b"}


def test_folders_that_are_gone_or_become_files_and_the_other_way_round(tmp_path):
    """An empty folder would be a class without images."""
    original = tmp_path / "original"
    for files in (["a/1", "b/1", "c"], ["a/1", "c/1"], ["a", "c/1/1"], ["a/1"]):
        shutil.rmtree(original, ignore_errors=True)
        for name in files:
            (original / name).parent.mkdir(parents=True, exist_ok=True)
            (original / name).write_text(name)
        copy = Path(fetch(str(original), tmp_path / "copies"))
        assert contents(copy) == contents(original)
        assert sorted(os.listdir(copy)) == sorted(os.listdir(original))


def test_queries_are_no_part_of_names(server, tmp_path):
    (server.folder / "x.png").write_bytes(b"x")
    signed = [f"{server.url}x.png?signature={sign}" for sign in ("a/b.c", "other", "long" * 100)]
    paths = fetch(signed, tmp_path / "copies")
    assert {Path(path).name for path in paths} == {"x.png"}
    assert len(set(paths)) == 3
    assert [Path(path).name for path in fetch([server.url + "more/d%20e"], tmp_path / "copies")] == ["d e"]
    assert fetch(server.url + "*/d*", tmp_path / "copies")[0].endswith("more/d e")


def test_links_on_a_disk_are_followed_or_refused(tmp_path):
    (tmp_path / "disk" / "below").mkdir(parents=True)
    (tmp_path / "disk" / "below" / "file").write_bytes(b"file")
    (tmp_path / "disk" / "link").symlink_to("below/file")
    copy = fetch(str(tmp_path / "disk"), tmp_path / "copies")
    assert contents(copy) == {"below/file": b"file", "link": b"file"}
    (tmp_path / "disk" / "folder").symlink_to("below")
    with pytest.raises(PipelineError, match="disk/folder', a link to a folder"):
        fetch(str(tmp_path / "disk"), tmp_path / "copies")
    (tmp_path / "disk" / "folder").unlink()
    (tmp_path / "disk" / "folder").symlink_to("nowhere")
    with pytest.raises(PipelineError, match=r"file at '.*disk/folder"):
        fetch(str(tmp_path / "disk"), tmp_path / "copies")


@pytest.mark.parametrize("names", [["a/b", "a//b"], ["a", "a/b"], ["a/b", "./a/b"]])
def test_names_that_a_disk_cannot_hold_together_are_refused(tmp_path, names):
    store = fsspec.filesystem("memory").store
    store.clear()
    store.update({f"/bucket/{name}": MemoryFile(None, f"/bucket/{name}", name.encode()) for name in names})
    with pytest.raises(PipelineError, match=f"hold together. Found '/bucket/.*{re.escape(names[1])}'"):
        fetch("memory://bucket", tmp_path / "copies")


def test_a_folder_inside_of_what_is_fetched_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"file")
    for folder in (tmp_path, tmp_path / "copies"):
        with pytest.raises(PipelineError, match="Expected `folder` outside"):
            fetch(str(tmp_path), folder)


def test_files_keep_the_order_of_the_list_and_globs_are_sorted(server, tmp_path):
    urls = [server.url + name for name in ("more/c", "a-1", "b", "a-1")]
    paths = fetch(urls, tmp_path / "copies")
    assert [Path(path).name for path in paths] == ["c", "a-1", "b", "a-1"]
    assert [Path(path).read_bytes() for path in paths] == [
        (server.folder / url[len(server.url) :]).read_bytes() for url in urls
    ]
    assert [Path(path).name for path in fetch(server.url + "a-*", tmp_path / "copies")] == ["a-0", "a-1", "a-2"]
    assert [Path(path).name for path in fetch(server.url + "b*", tmp_path / "copies")] == ["b"]
    assert Path(fetch(server.url + "b", tmp_path / "copies")).read_bytes() == (server.folder / "b").read_bytes()


FAILING = [(500, 128), (429, 128), (503, 2), ("truncates", 128), ("truncates", 2), ("shortens", 128), ("stalls", 2)]


@pytest.mark.parametrize(("fault", "at_once"), [*FAILING, ("refuses", 128)])
def test_what_fails_for_a_while_is_asked_for_again(server, tmp_path, monkeypatch, fault, at_once):
    """Files, and with "refuses" the listings and sizes too."""
    monkeypatch.setattr(remote, "_AT_ONCE", at_once)
    failed, times = Counter(), 1 if fault == "stalls" else 3

    def fails(request):
        failed[request.path] += 1
        return failed[request.path] <= times

    if fault == "refuses":
        server.refuses = lambda request: 503 * fails(request)
    else:
        server.faults = lambda request: fault if fails(request) else None
    assert contents(fetch(server.url, tmp_path / "copies")) == contents(server.folder)
    asked = [count for path, count in failed.items() if path != "/a-2" or not isinstance(fault, str)]
    assert len(asked) >= 5
    assert min(asked) >= times + 1


def test_a_folder_that_is_not_listed_is_an_error_and_its_copies_stay(server, tmp_path):
    copy = fetch(server.url, tmp_path / "copies")
    server.refuses = lambda request: 404 * request.path.startswith("/more")
    for url in (server.url, server.url + "*/c"):
        with pytest.raises(PipelineError, match="/more"):
            fetch(url, tmp_path / "copies")
    assert contents(copy) == contents(server.folder)


@pytest.mark.parametrize(
    ("fault", "said", "requests"), [(500, "in 8 tries", 8), (403, "403", 1), ("shortens", "only 500 of 1,000 bytes", 8)]
)
def test_what_fails_for_good_is_named_and_the_rest_is_kept(server, tmp_path, fault, said, requests):
    server.faults = lambda request: fault if request.path == "/a-1" else None
    with pytest.raises(PipelineError, match=said) as caught:
        fetch([server.url + name for name in ("b", "a-1")], tmp_path / "copies")
    assert "/a-1" in str(caught.value)
    assert gets(server)["/a-1"] == requests
    assert not list((tmp_path / "copies").rglob("parts/*"))
    assert not list((tmp_path / "copies").rglob("a-1"))
    server.faults = lambda request: None
    paths = fetch([server.url + name for name in ("b", "a-1")], tmp_path / "copies")
    assert [os.path.getsize(path) for path in paths] == [1, 1000]


@pytest.mark.parametrize(("name", "change"), [("a-2", "grows"), ("b", "grows"), ("a-0", "grows"), ("a-0", "replaced")])
def test_a_file_that_changes_meanwhile_is_refused(server, tmp_path, name, change):
    """The first bytes of one that grows would be a file that is cut; only large ones are looked at again."""

    def changes(request):
        if change == "grows":
            with open(server.folder / name, "ab") as file:
                file.write(b"more")
        else:
            (server.folder / "new").write_bytes(bytes(3500))
            os.replace(server.folder / "new", server.folder / name)

    server.faults = changes
    with pytest.raises(PipelineError, match="It changed while it was fetched"):
        fetch([server.url + name], tmp_path / "copies")
    assert not list((tmp_path / "copies").rglob(name))


def test_a_disk_that_is_too_small_is_refused_before(server, tmp_path, monkeypatch):
    monkeypatch.setattr(remote.shutil, "disk_usage", lambda path: SimpleNamespace(free=3000))
    with pytest.raises(PipelineError, match=r"Expected room .* another `folder`"):
        fetch(server.url, tmp_path / "copies")
    assert set(gets(server)) == {"/", "/more/"}


def test_a_disk_that_fills_up_leaves_no_part(server, tmp_path, monkeypatch):
    def full(self, path, part, **options):
        Path(part).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "the disk is full")

    monkeypatch.setattr(LocalFileSystem, "get_file", full)
    with pytest.raises(PipelineError, match=r"the disk is full.*Make room"):
        fetch(str(server.folder / "b"), tmp_path / "copies")
    assert [path.name for path in (tmp_path / "copies").rglob("*") if path.is_file()] == ["fetched.jsonl"]


def test_an_interrupt_ends_all_requests(server, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "_PAUSES", [0.1] * 50)

    def refuses(request):
        if len(server.requests) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return 503

    server.refuses = refuses
    with pytest.raises(KeyboardInterrupt):
        fetch(server.url, tmp_path / "copies")
    time.sleep(0.2)
    before = len(server.requests)
    time.sleep(0.5)
    assert len(server.requests) == before


@pytest.mark.parametrize(
    ("urls", "error", "said"),
    [
        (lambda url: 3, TypeError, "Received: 3"),
        (lambda url: [], TypeError, "Received: "),
        (lambda url: "nothing://x/y", PipelineError, "nothing://x/y"),
        (lambda url: f"{url}nothing", PipelineError, "Check the URL"),
        (lambda url: f"{url}nothing-*", PipelineError, "Found none"),
        (lambda url: [url, f"{url}b"], PipelineError, "in a call of its own"),
    ],
)
def test_what_cannot_be_is_refused(server, tmp_path, urls, error, said):
    with pytest.raises(error, match=said):
        fetch(urls(server.url), tmp_path / "copies")


@pytest.mark.parametrize("source", [build_pipeline, records, lines, images, table, npy, lambda path: hdf5(path, "x")])
def test_sources_refuse_what_cannot_be_read_there(source):
    for name in ["data.npy"] if source is npy else ["data", "labels.csv"] if source is images else ["data"]:
        with pytest.raises(PipelineError, match=rf"Pass tfopt\.pipelines\.fetch\('s3://bucket/{name}"):
            source(f"s3://bucket/{name}")


def test_processes_share_one_copy(server, tmp_path):
    server.faults = lambda request: time.sleep(0.01)
    results = []
    fetching = [threading.Thread(target=lambda: results.append(fetch(server.url, tmp_path / "c"))) for _ in range(3)]
    for thread in fetching:
        thread.start()
    for thread in fetching:
        thread.join()
    assert len(results) == 3
    assert len(set(results)) == 1
    assert contents(results[0]) == contents(server.folder)
    assert gets(server)["/a-0"] == 1


FETCHES = """
import sys
from tfopt.pipelines import fetch
fetch(sys.argv[1], sys.argv[2])
"""


@pytest.mark.slow
@pytest.mark.parametrize("pause", [0.0, 0.05, *(pytest.param(n / 10, marks=pytest.mark.campaign) for n in range(2, 8))])
def test_a_kill_leaves_nothing_that_is_half_fetched(server, tmp_path, pause):
    server.faults = lambda request: time.sleep(0.03)
    process = subprocess.Popen([sys.executable, "-c", FETCHES, server.url, tmp_path / "copies"])
    while not server.requests:
        time.sleep(0.01)
    time.sleep(pause)
    process.send_signal(signal.SIGKILL)
    process.wait()
    found = {path.name: path.read_bytes() for path in (tmp_path / "copies").rglob("data/**/*") if path.is_file()}
    originals = {path.name: path.read_bytes() for path in server.folder.rglob("*") if path.is_file()}
    assert all(content == originals[name] for name, content in found.items())
    copy = fetch(server.url, tmp_path / "copies")
    assert contents(copy) == contents(server.folder)
