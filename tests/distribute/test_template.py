"""The templates as the command prints them; the Kubernetes one parsed by Kubernetes' own client."""

import subprocess
import sys
from pathlib import Path

import pytest

from tfopt.distribute.cluster.kubernetes import from_kubernetes
from tfopt.distribute.template import FILES, main, template

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
            (["kubernets"], "Expected a template: 'slurm', 'kubernetes' or 'ray'. Received: 'kubernets'. Did you mean"),
            ([], "required: {slurm,kubernetes,ray}"),
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

    def test_help(self, capsys):
        with pytest.raises(SystemExit) as end:
            main(["--help"])
        assert end.value.code == 0
        said = capsys.readouterr().out
        assert all(each in said for each in ("slurm", "kubernetes", "ray", "exit codes"))

    def test_loads_nothing_heavy(self):
        heavy = ("tensorflow", "keras", "numpy", "ray", "yaml", "pynvml")
        code = (
            f"from tfopt.distribute.template import main; main(['ray']); import sys; print({heavy!r}, file=sys.stderr);"
        )
        code += f"sys.exit(bool([each for each in {heavy!r} if each in sys.modules]))"
        assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def manifest():
    """The Kubernetes template's documents, as plain YAML and as Kubernetes' models."""
    reason = "needs Kubernetes' Python client: pip install kubernetes pyyaml"
    yaml, client = pytest.importorskip("yaml", reason=reason), pytest.importorskip("kubernetes.client", reason=reason)
    documents = list(yaml.safe_load_all(template("kubernetes")))
    api = client.ApiClient()
    models = [api._ApiClient__deserialize(document, f"V1{document['kind']}") for document in documents]
    return documents, models, [api.sanitize_for_serialization(model) for model in models]


@pytest.fixture
def service(manifest):
    return manifest[1][0]


@pytest.fixture
def job(manifest):
    return manifest[1][1]


class TestTheManifest:
    def test_has_no_field_that_kubernetes_does_not_know(self, manifest):
        documents, _, understood = manifest
        assert [document["kind"] for document in documents] == ["Service", "Job"]
        assert understood == documents

    def test_a_headless_service_names_the_pods_of_the_job(self, service, job):
        pod = job.spec.template.spec
        assert service.spec.cluster_ip == "None"
        assert service.spec.publish_not_ready_addresses is True
        assert service.spec.selector == {"job-name": job.metadata.name}
        assert pod.subdomain == service.metadata.name
        term = pod.affinity.pod_anti_affinity.preferred_during_scheduling_ignored_during_execution[0]
        assert term.pod_affinity_term.label_selector.match_labels == service.spec.selector

    def test_each_pod_finds_its_place_among_the_names_of_the_service(self, service, job):
        assert job.spec.completion_mode == "Indexed"
        assert job.spec.parallelism == job.spec.completions > 1
        (container,) = job.spec.template.spec.containers
        port = service.spec.ports[0].port
        assert container.ports[0].container_port == port
        names = [f"{job.metadata.name}-{index}" for index in range(job.spec.completions)]
        for index, name in enumerate(names):
            given = {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": name, "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
            cluster = from_kubernetes(given | {entry.name: entry.value for entry in container.env})
            assert cluster.workers == tuple(f"{name}.{service.metadata.name}:{port}" for name in names)
            assert cluster.index == index

    @pytest.mark.parametrize(
        ("exit_code", "action"),
        [(75, "Ignore"), (1, "FailJob"), (2, "FailJob"), (3, "FailJob"), (137, None), (143, None)],
    )
    def test_75_starts_again_an_error_fails_the_job_and_a_killed_worker_counts(self, job, exit_code, action):
        assert job.spec.template.spec.restart_policy == "Never"
        assert job.spec.backoff_limit > 0
        assert self.action(job, exit_code) == action

    def action(self, job, exit_code):
        """What Kubernetes does after this exit code: the first matching rule's action. None: it counts."""
        (container,) = job.spec.template.spec.containers
        for rule in job.spec.pod_failure_policy.rules:
            codes = rule.on_exit_codes
            if codes and (exit_code in codes.values) == (codes.operator == "In"):
                assert codes.container_name == container.name
                return rule.action
        return None

    def test_a_drained_node_fails_nothing(self, job):
        first = job.spec.pod_failure_policy.rules[0]
        assert (first.action, first.on_pod_conditions[0].type) == ("Ignore", "DisruptionTarget")

    def test_what_a_training_needs_of_its_pod(self, job):
        pod = job.spec.template.spec
        (container,) = pod.containers
        assert pod.share_process_namespace is True
        assert pod.termination_grace_period_seconds > 30
        assert container.resources.requests == container.resources.limits
        mounts = {mount.mount_path: mount.name for mount in container.volume_mounts}
        (shared,) = [volume for volume in pod.volumes if volume.name == mounts["/dev/shm"]]
        assert shared.empty_dir.medium == "Memory"
        assert set(mounts.values()) == {volume.name for volume in pod.volumes}

    @pytest.mark.parametrize("subject", ["SITE", "nvidia.com/mig-", "Time-slicing", "MPS", "topology manager", "kueue"])
    def test_comments_where_a_site_decides(self, subject):
        assert subject in template("kubernetes")
