"""Processes that are told what to do: who ends, hangs or stays silent is named with what it wrote."""

import json
import os

import child_jobs
import pytest
import replicas
from replicas import Group, Job

from tfopt.errors import TfoptError


@pytest.fixture(autouse=True)
def _workers_without_tensorflow(monkeypatch):
    monkeypatch.setattr(replicas, "work", child_jobs.works)


@pytest.fixture
def group():
    with Group([Job("none", rank, None) for rank in range(2)]) as group:
        yield group


def test_each_has_its_place_in_the_cluster_and_no_gpu(group):
    answers = group.answers()
    tasks = [json.loads(answer["TF_CONFIG"]) for answer in answers]
    assert [task["task"] for task in tasks] == [{"type": "worker", "index": 0}, {"type": "worker", "index": 1}]
    assert tasks[0]["cluster"] == tasks[1]["cluster"]
    assert len(set(tasks[0]["cluster"]["worker"])) == 2
    assert {answer["CUDA_VISIBLE_DEVICES"] for answer in answers} == {"-1"}


def test_one_alone_is_no_cluster(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "of somebody else")
    with Group([Job("none", 0, None)]) as group:
        assert group.answers()[0]["TF_CONFIG"] == ""


def test_all_are_asked_and_answer(group):
    group.answers()
    assert group.ask("add", steps=3) == [{"call": "add", "arguments": {"steps": 3}}] * 2


def test_one_that_fails_is_named_with_its_error(group):
    group.answers()
    with pytest.raises(
        TfoptError, match=r"worker [01] to answer to 'fail'.* ended(.|\n)*ZeroDivisionError: of its own mak"
    ):
        group.ask("fail")


def test_one_that_does_not_answer(group, monkeypatch):
    group.answers()
    monkeypatch.setattr(replicas, "_ANSWER_SECONDS", 0.5)
    with pytest.raises(TfoptError, match=r"worker 0 to answer to 'ignore' within 0\.5 s\. Found that it did not"):
        group.ask("ignore")


def test_none_is_left(group):
    pids = [answer["pid"] for answer in group.answers()]
    group.__exit__(None, None, None)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
