"""expand_hosts(): every form of Slurm's host lists, compared with Slurm's own answer if it is installed."""

import os
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfopt.distribute.cluster.slurm import expand_hosts
from tfopt.errors import ClusterError

needs_slurm = pytest.mark.skipif(not shutil.which("scontrol"), reason="needs scontrol of Slurm, not installed")


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", "n1"),
        ("n[9-10]", "n9 n10"),
        ("n[10,9]", "n10 n9"),
        ("n[1,1],n1", "n1 n1 n1"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[001-003,7]", "n001 n002 n003 n7"),
        ("n[9-010]", "n9 n10"),
        ("n[1-2,5],m[3-4],login", "n1 n2 n5 m3 m4 login"),
        ("n[1-2]r[1-3]", "n1r1 n1r2 n1r3 n2r1 n2r2 n2r3"),
        ("a[1-2]b[3-4]c[5-6]", "a1b3c5 a1b3c6 a2b3c5 a2b3c6 a1b4c5 a1b4c6 a2b4c5 a2b4c6"),
        ("a[01-02]b[3,4]c[005]", "a01b3c005 a02b3c005 a01b4c005 a02b4c005"),
        ("node[1-2]-ib", "node1-ib node2-ib"),
        ("r[1-2]n[1-2]-ib.site", "r1n1-ib.site r1n2-ib.site r2n1-ib.site r2n2-ib.site"),
        ("[1-2]", "1 2"),
        ("n[999999999999999999]", "n999999999999999999"),
    ],
)
def test_valid_lists(text, hosts):
    assert expand_hosts(text) == tuple(hosts.split())


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "''; unbalanced brackets"),
        ("n[1-2", "brackets, a misplaced comma"),
        ("n[[1-2]]", "brackets, a misplaced comma"),
        ("a,,b", "brackets, a misplaced comma"),
        ("a b", "or a space"),
        ("n[]", "'' is neither a number nor a range"),
        ("n[2-1]", "'2-1' is neither a number nor a range"),
        ("n[a-c]", "'a-c' is neither a number nor a range"),
        ("n[٣]", "'٣' is neither a number nor a range"),
        ("n[1-9999999999999999999]", "is neither a number nor a range"),
        ("n[1-999999999]", "it names more than 65536 hosts"),
        ("n[1-256]r[1-257]", "it names more than 65536 hosts"),
        ("n" + "[1-9]" * 30, "it names more than 65536 hosts"),
        ("n" * 253 + "[1-2]", "one of its names is longer than 253 characters"),
    ],
)
def test_malformed_lists(text, fault):
    with pytest.raises(ClusterError) as caught:
        expand_hosts(text)
    said = str(caught.value)
    assert said.startswith("Expected a host list as Slurm writes it, n[1-3,07],login. Found: ")
    assert fault in said.partition(". What to do: ")[0]
    assert said.isprintable()


def test_as_many_hosts_as_are_allowed():
    assert len(expand_hosts("n[1-256]r[1-256]")) == 65536


@given(st.text(alphabet="n[]-,019 é\n", max_size=30))
def test_any_text_gives_names_or_a_cluster_error(text):
    try:
        hosts = expand_hosts(text)
    except ClusterError:
        return
    assert hosts
    assert not set("[], \n") & set("".join(hosts))


numbers = st.integers(0, 120).flatmap(lambda n: st.sampled_from([f"{n}", f"{n:02}", f"{n:04}"]))
ranges = st.tuples(numbers, st.integers(0, 12)).map(lambda r: f"{r[0]}-{int(r[0]) + r[1]}")
groups = st.lists(numbers | ranges, min_size=1, max_size=3).map(lambda parts: f"[{','.join(parts)}]")
words = st.text(alphabet="abr-0", max_size=3)
# Without text after the brackets, which Slurm 22.05 refuses.
entries = st.tuples(st.sampled_from(["n", "node-", "r0"]), st.lists(st.tuples(words, groups), max_size=3)).map(
    lambda entry: entry[0] + "".join(word + group for word, group in entry[1])
)
hostlists = st.lists(entries, min_size=1, max_size=3).map(",".join)


@pytest.mark.slow
@needs_slurm
@settings(max_examples=300)
@given(hostlists)
def test_slurm_expands_it_to_the_same(tmp_path_factory, text):
    configuration = tmp_path_factory.getbasetemp() / "slurm.conf"  # scontrol does not run without one
    configuration.write_text("ClusterName=none\nSlurmctldHost=localhost\n")
    command = ["scontrol", "show", "hostnames", text]
    environ = os.environ | {"SLURM_CONF": str(configuration)}
    answer = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=60)
    assert expand_hosts(text) == tuple(answer.stdout.split())
