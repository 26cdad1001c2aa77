"""The Kubernetes templates, parsed by Kubernetes' own client and held against its rules written out here."""

from collections import Counter
from copy import deepcopy
from itertools import count

import pytest

from tfopt.distribute.cluster.kubernetes import from_kubernetes
from tfopt.distribute.template import template

KINDS = {"kubernetes": ["Service", "NetworkPolicy", "Job"], "jobset": ["NetworkPolicy", "JobSet"]}
# What JobSet's v1alpha2 API knows, of what a template may need; Kubernetes' client has no model of it.
JOBSET = {
    "network": {"enableDNSHostnames", "publishNotReadyAddresses", "subdomain"},
    "failurePolicy": {"maxRestarts", "restartStrategy", "rules"},
    "replicatedJobs": {"name", "replicas", "template"},
    "ttlSecondsAfterFinished": set(),
}
RESTARTS = 20


def restricted(pod):
    """What in a pod's spec the Pod Security Standard "restricted" forbids, by the rules of Kubernetes 1.31."""
    found = [field for field in ("hostNetwork", "hostPID", "hostIPC") if pod.get(field)]
    own = pod.get("securityContext", {})
    volumes = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    found += [f"volume {each['name']}" for each in pod.get("volumes", []) if set(each) - {"name"} - volumes]
    found += ["sysctls"] if own.get("sysctls") else []
    found += ["runAsUser"] if own.get("runAsUser") == 0 else []
    for container in [*pod["containers"], *pod.get("initContainers", []), *pod.get("ephemeralContainers", [])]:
        context = container.get("securityContext", {})
        capabilities = context.get("capabilities", {})
        profile = context.get("seccompProfile", own.get("seccompProfile", {})).get("type")
        rules = {
            "privileged": not context.get("privileged"),
            "allowPrivilegeEscalation": context.get("allowPrivilegeEscalation") is False,
            "capabilities.drop": "ALL" in capabilities.get("drop", []),
            "capabilities.add": set(capabilities.get("add", [])) <= {"NET_BIND_SERVICE"},
            "runAsNonRoot": context.get("runAsNonRoot", own.get("runAsNonRoot")) is True,
            "runAsUser": context.get("runAsUser") != 0,
            "seccompProfile": profile in ("RuntimeDefault", "Localhost"),
            "procMount": context.get("procMount", "Default") == "Default",
            "hostPort": not any(port.get("hostPort") for port in container.get("ports", [])),
        }
        found += [name for name, kept in rules.items() if not kept]
    return found


class Manifest:
    """A template's documents as plain YAML, and its Job as the client's model."""

    def __init__(self, name):
        reason = "needs Kubernetes' Python client: pip install kubernetes pyyaml"
        yaml = pytest.importorskip("yaml", reason=reason)
        client = pytest.importorskip("kubernetes.client", reason=reason)
        self.api = client.ApiClient()
        self.name = name
        self.documents = list(yaml.safe_load_all(template(name)))
        self.by_kind = {document["kind"]: document for document in self.documents}
        self.top = self.documents[-1]  # the Job or JobSet
        if name == "jobset":
            (replicated,) = self.top["spec"]["replicatedJobs"]
            self.plain_job = replicated["template"]
            self.job_name = f"{self.top['metadata']['name']}-{replicated['name']}-0"
            self.domain = self.top["metadata"]["name"]
            self.label = {"jobset.sigs.k8s.io/jobset-name": self.top["metadata"]["name"]}
        else:
            self.plain_job = self.top
            self.job_name = self.top["metadata"]["name"]
            self.domain = self.by_kind["Service"]["metadata"]["name"]
            self.label = {"job-name": self.job_name}
        self.job = self.understood(self.plain_job, "Job")
        self.plain_pod = self.plain_job["spec"]["template"]["spec"]
        self.pod = self.job.spec.template.spec
        (self.container,) = self.pod.containers

    def understood(self, document, kind):
        return self.api._ApiClient__deserialize(document, f"V1{kind}")

    def action(self, exit_code, *, disrupted=False):
        """What Kubernetes does after this exit code: the first matching rule's action. "Count" is the default."""
        for rule in self.job.spec.pod_failure_policy.rules:
            codes = rule.on_exit_codes
            if codes and (exit_code in codes.values) == (codes.operator == "In"):
                assert codes.container_name == self.container.name
                return rule.action
            if disrupted and any(each.type == "DisruptionTarget" for each in rule.on_pod_conditions or ()):
                return rule.action
        return "Count"


@pytest.fixture(scope="module", params=KINDS)
def manifest(request):
    return Manifest(request.param)


def test_has_no_field_that_kubernetes_does_not_know(manifest):
    assert [document["kind"] for document in manifest.documents] == KINDS[manifest.name]
    documents = [document for document in manifest.documents if document["kind"] != "JobSet"]
    if manifest.name == "jobset":
        documents.append(manifest.plain_job)
        assert manifest.top["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
        for field, value in manifest.top["spec"].items():
            for part in value if isinstance(value, list) else [value]:
                assert not isinstance(part, dict) or set(part) <= JOBSET[field]
    for document in documents:
        model = manifest.understood(document, document.get("kind", "Job"))
        assert manifest.api.sanitize_for_serialization(model) == document


def test_a_headless_service_names_the_pods():
    manifest = Manifest("kubernetes")
    service = manifest.understood(manifest.by_kind["Service"], "Service")
    assert service.spec.cluster_ip == "None"
    assert service.spec.publish_not_ready_addresses is True
    assert service.spec.selector == manifest.label
    assert manifest.pod.subdomain == service.metadata.name
    assert [port.port for port in service.spec.ports] == [manifest.container.ports[0].container_port]
    network = Manifest("jobset").top["spec"]["network"]  # JobSet makes the Service
    assert network == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}


def test_each_pod_finds_its_place(manifest):
    spec = manifest.job.spec
    assert spec.completion_mode == "Indexed"
    assert spec.parallelism == spec.completions > 1
    names = [f"{manifest.job_name}-{index}" for index in range(spec.completions)]
    port = manifest.container.ports[0].container_port
    for index, name in enumerate(names):
        given = {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": name, "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
        cluster = from_kubernetes(given | {entry.name: entry.value for entry in manifest.container.env})
        assert cluster.workers == tuple(f"{name}.{manifest.domain}:{port}" for name in names)
        assert cluster.index == index


def test_meets_the_standard_restricted(manifest):
    assert restricted(manifest.plain_pod) == []


def test_only_pods_of_the_same_training_reach_its_ports(manifest):
    policy = manifest.understood(manifest.by_kind["NetworkPolicy"], "NetworkPolicy").spec
    assert policy.policy_types == ["Ingress"]  # data and names come from elsewhere: what goes out is free
    assert policy.pod_selector.match_labels == manifest.label
    (rule,) = policy.ingress
    assert rule.ports is None  # NCCL chooses its own
    (source,) = rule._from
    assert source.pod_selector.match_labels == manifest.label
    assert source.namespace_selector is source.ip_block is None


@pytest.mark.parametrize(("exit_code", "action"), [(1, "FailJob"), (2, "FailJob"), (75, "Count"), (137, "Count")])
def test_an_error_fails_the_job_and_anything_else_is_a_restart(manifest, exit_code, action):
    assert manifest.job.spec.template.spec.restart_policy == "Never"
    assert manifest.action(exit_code) == action
    assert manifest.action(exit_code, disrupted=True) in ("Count", "Ignore")  # a drained node is not the script's fault


@pytest.mark.parametrize(("ends", "disrupted"), [([75, 75], False), ([75, 137], True), ([143, 75], True)], ids=str)
def test_restarts_are_bounded(manifest, ends, disrupted):
    """Plays Kubernetes: both workers end like this again and again, the second perhaps because its node is drained."""
    spec = manifest.job.spec
    for runs in count(1):
        assert runs <= 10 * RESTARTS, "it restarts endlessly"
        actions = [manifest.action(code, disrupted=disrupted and index == 1) for index, code in enumerate(ends)]
        counted = Counter(index for index, action in enumerate(actions) if action == "Count")
        if manifest.name == "kubernetes":
            failed = [index for index, one in counted.items() if one * runs > spec.backoff_limit_per_index]
            ended = len(failed) > spec.max_failed_indexes
        else:  # the Job fails as a whole, and JobSet starts another
            assert counted.total() == spec.backoff_limit + 1  # the last worker's end, not one before
            ended = runs > manifest.top["spec"]["failurePolicy"]["maxRestarts"]
        if ended:
            break
    assert runs == RESTARTS + 1


def test_an_error_fails_the_jobset_too():
    (rule,) = Manifest("jobset").top["spec"]["failurePolicy"]["rules"]
    assert rule["action"] == "FailJobSet"
    assert set(rule["onJobFailureReasons"]) == {"PodFailurePolicy", "DeadlineExceeded"}  # Kubernetes' names


def test_a_finished_training_is_deleted_after_a_day(manifest):
    assert manifest.top["spec"]["ttlSecondsAfterFinished"] == 24 * 60 * 60
    assert manifest.job.spec.active_deadline_seconds > 0


def test_what_a_training_needs_of_its_pod(manifest):
    pod, container = manifest.pod, manifest.container
    assert pod.share_process_namespace is True
    assert {each.name: each.value for each in container.env}["TFOPT_WATCH_PROGRESS_SECONDS"] == "3600"
    assert pod.termination_grace_period_seconds > 30
    assert container.command[0] == "python"  # a shell would keep SIGTERM to itself
    assert manifest.job.spec.pod_replacement_policy == "Failed"
    term = pod.affinity.pod_anti_affinity.preferred_during_scheduling_ignored_during_execution[0]
    assert term.pod_affinity_term.label_selector.match_labels == manifest.label
    assert container.resources.requests == container.resources.limits
    mounts = {mount.mount_path: mount.name for mount in container.volume_mounts}
    (shared,) = [volume for volume in pod.volumes if volume.name == mounts["/dev/shm"]]
    assert shared.empty_dir.medium == "Memory"
    assert set(mounts.values()) == {volume.name for volume in pod.volumes}


def test_both_templates_start_the_same_pods():
    job, jobset = (deepcopy(Manifest(name).plain_pod) for name in KINDS)
    del job["subdomain"]  # JobSet sets it
    for pod in (job, jobset):
        del pod["affinity"]  # by label
        assert pod["containers"][0]["env"].pop(0)["name"] == "TFOPT_WORKERS"
    assert job == jobset
