"""The files of cluster=kubernetes are consistent, and valid under the schemas that Kubernetes and Kubeflow publish."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from conftest import CHOICES, Bake
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob
from runs import free_port, records, started

Document = dict[str, Any]

TIMEOUT = 600.0  # Seconds; an idle machine needs about ten.
VERSIONS = ["1.29", kubernetes_validate.latest_version()]  # The oldest one that job.yaml supports, and the newest.
LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")  # RFC 1035, which the API requires.
COMPLETION_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
every_project = pytest.mark.parametrize(
    ("parallelism", "launcher"), [(p, launcher) for p in CHOICES["parallelism"] for launcher in CHOICES["launcher"]]
)


def read_documents(project: Path) -> dict[str, Document]:
    """Return the documents in scripts/ by kind."""
    paths = sorted((project / "scripts").glob("*.yaml"))
    documents = [document for path in paths for document in yaml.safe_load_all(path.read_text())]
    by_kind = {document["kind"]: document for document in documents}
    assert len(by_kind) == len(documents)
    return by_kind


def is_valid(document: Document, version: str) -> bool:
    """Return whether the API would accept a document: no unknown field, and no field of another type."""
    if document["kind"] == "TrainJob":  # Kubeflow's types drop unknown fields.
        try:
            return TrainerV1alpha1TrainJob.from_dict(document).to_dict() == document
        except ValueError:
            return False
    try:
        kubernetes_validate.validate(document, version, strict=True)
    except kubernetes_validate.ValidationError:
        return False
    return True


@every_project
def test_documents_are_valid(baked: Bake, parallelism: str, launcher: str) -> None:
    documents = read_documents(baked(cluster="kubernetes", parallelism=parallelism, launcher=launcher))
    service = {"Service"} if parallelism != "data_parallel" else set()
    assert documents.keys() == {"PersistentVolumeClaim", "Job", "TrainJob"} | service
    for document in documents.values():
        for version in VERSIONS:
            assert is_valid(document, version), document["kind"]


# Below these keys, any name is valid.
FREE_FORM = {"selector", "limits", "requests"}


def misspell_each_key(node: Any) -> Iterator[None]:
    """Misspell the keys one at a time, in place: yield after each change, then undo it."""
    if isinstance(node, list):
        for item in node:
            yield from misspell_each_key(item)
    elif isinstance(node, dict):
        for key in list(node):
            value = node.pop(key)
            node[f"{key}s"] = value
            yield
            del node[f"{key}s"]
            node[key] = value
            if key not in FREE_FORM:
                yield from misspell_each_key(value)


def test_every_misspelled_key_is_invalid(baked: Bake) -> None:
    """The test above can fail for every key of every document."""
    count = 0
    for document in read_documents(baked(cluster="kubernetes")).values():
        changed = copy.deepcopy(document)
        for section in ("metadata", "spec"):
            for _ in misspell_each_key(changed[section]):
                count += 1
                assert not is_valid(changed, VERSIONS[-1]), yaml.safe_dump(changed)
        assert changed == document
    assert count > 100


def pod_of(document: Document) -> Document:
    """Return the pod's specification in a Job; in a TrainJob, the patch of the runtime's pod specification."""
    spec = document["spec"]
    if document["kind"] == "TrainJob":
        job = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
        assert spec["runtimeRef"] == {"name": "torch-distributed"} and job["name"] == "node"
        spec = job["template"]["spec"]
    return spec["template"]["spec"]


def container_of(document: Document) -> Document:
    """Return the specification of the container that trains, as the cluster starts it."""
    (container,) = pod_of(document)["containers"]
    if document["kind"] == "TrainJob":
        assert container["name"] == "node"
        return container | document["spec"]["trainer"] | {"resources": document["spec"]["trainer"]["resourcesPerNode"]}
    return container


def variables_of(document: Document) -> dict[str, str]:
    """Return the variables of the container; for those that the cluster fills in, the path of the field."""
    variables = {}
    for entry in container_of(document)["env"]:
        variables[entry["name"]] = entry["value"] if "value" in entry else entry["valueFrom"]["fieldRef"]["fieldPath"]
    return variables


@pytest.mark.parametrize("kind", ["Job", "TrainJob"])
@every_project
def test_a_pod_has_what_training_needs(baked: Bake, parallelism: str, launcher: str, kind: str) -> None:
    documents = read_documents(baked(cluster="kubernetes", parallelism=parallelism, launcher=launcher))
    spec, container, variables = pod_of(documents[kind]), container_of(documents[kind]), variables_of(documents[kind])
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume.pop("name"): volume for volume in copy.deepcopy(spec["volumes"])}
    assert mounts.keys() == {"/app/runs", "/dev/shm"} and set(mounts.values()) == volumes.keys()
    claim = documents["PersistentVolumeClaim"]
    assert volumes[mounts["/app/runs"]] == {"persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}}
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert container["resources"]["limits"]["nvidia.com/gpu"] >= 2
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["fsGroup"]
    # A save may take longer than by default, and the launcher ends before the cluster kills it.
    assert 120 <= int(variables["STOP_SECONDS"]) < spec["terminationGracePeriodSeconds"]
    assert ("MAX_RESTARTS" in variables) == (launcher == "torchrun")
    assert variables.get("STOP_CODE") == (None if parallelism == "data_parallel" else "75")


@pytest.mark.parametrize("parallelism", [p for p in CHOICES["parallelism"] if p != "data_parallel"])
def test_the_pods_of_a_job_can_reach_each_other(baked: Bake, parallelism: str) -> None:
    documents = read_documents(baked(cluster="kubernetes", parallelism=parallelism))
    service, job, variables = documents["Service"], documents["Job"], variables_of(documents["Job"])
    name = job["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}  # The Job controller sets this label.
    assert pod_of(job)["subdomain"] == service["metadata"]["name"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(variables["NODES"]) == 2
    assert variables["HEAD"] == f"{name}-0.{service['metadata']['name']}"
    assert (variables["NODE_RANK"], variables["LOCAL_ADDR"]) == (COMPLETION_INDEX, "status.podIP")


@pytest.mark.parametrize("launcher", CHOICES["launcher"])
def test_failed_pods_are_replaced_unless_their_settings_are_invalid(baked: Bake, launcher: str) -> None:
    job = read_documents(baked(cluster="kubernetes", launcher=launcher))["Job"]
    disrupted, invalid, *stopped = job["spec"]["podFailurePolicy"]["rules"]
    codes = {"containerName": container_of(job)["name"], "operator": "In"}
    assert disrupted == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert invalid == {"action": "FailJob", "onExitCodes": codes | {"values": [2]}}
    # launch.py ends with the exit code of its ranks; torchrun continues and restarts them.
    code = int(variables_of(job)["STOP_CODE"])
    assert stopped == ([{"action": "Ignore", "onExitCodes": codes | {"values": [code]}}] if launcher == "spawn" else [])
    assert pod_of(job)["restartPolicy"] == "Never"  # The API requires it for a podFailurePolicy.


@pytest.mark.parametrize("slug", ["My_Experiment", "null", "a-very-long-name-for-an-experiment-with-33_3-words-in-it"])
def test_names_are_valid_for_any_project_slug(bake: Bake, slug: str) -> None:
    project = bake(project_slug=slug, cluster="kubernetes", docker=True)
    documents = read_documents(project)
    for document in documents.values():
        assert LABEL.fullmatch(document["metadata"]["name"])
        assert is_valid(document, VERSIONS[-1])
    # The host names of a pod of the Job and a pod of the TrainJob.
    assert LABEL.fullmatch(f"{documents['Job']['metadata']['name']}-99999")
    assert LABEL.fullmatch(f"{documents['TrainJob']['metadata']['name']}-node-0-99999")
    # Docker requires lowercase image names.
    texts = (project / "Dockerfile").read_text() + (project / "README.md").read_text()
    tags = re.findall(r"docker build -t (\S+)", texts)
    assert len(tags) == 3 and all(re.fullmatch(r"[a-z0-9./-]+", tag) for tag in tags)


class Pods:
    """Simulated pods of a run on this machine: each pod is a process with its container's command and variables.

    Args:
        project: The rendered project, which replaces the image.
        document: The Job or the TrainJob.
        arguments: Additional arguments of the container's command.
    """

    def __init__(self, project: Path, document: Document, *arguments: str) -> None:
        self.project, self.document, self.arguments = project, document, arguments
        self.started: list[subprocess.Popen[str]] = []
        self.stack = ExitStack()
        self.port = str(free_port())

    def __enter__(self) -> Pods:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def start(self, index: int) -> subprocess.Popen[str]:
        """Start a pod, with the variables that the cluster would fill in, and return its process."""
        container = container_of(self.document)
        fields = {COMPLETION_INDEX: str(index), "status.podIP": "127.0.0.1"}
        variables = {name: fields.get(value, value) for name, value in variables_of(self.document).items()}
        arguments = [*container["args"], *self.arguments]
        if self.document["kind"] == "TrainJob":
            # https://github.com/kubeflow/trainer/blob/v2.3.0/pkg/runtime/framework/plugins/torch/torch.go
            variables |= {"PET_NNODES": str(container["numNodes"]), "PET_NODE_RANK": str(index)}
            variables |= {"PET_NPROC_PER_NODE": "auto", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": self.port}
            arguments = [" ".join(arguments)]  # `bash -c` takes one argument.
        else:
            variables |= {"HEAD": "127.0.0.1", "PORT": self.port}
        variables |= {"NPROC": "1", "PYTHON": sys.executable, "GLOO_SOCKET_IFNAME": "lo"}
        command, log = [*container["command"], *arguments], self.project / f"{len(self.started)}.log"
        pod = self.stack.enter_context(started(*command, cwd=self.project, log=log, **variables))
        self.started.append(pod)
        return pod

    def wait_for_training(self) -> None:
        """Wait until the run has logged its first step."""
        deadline = time.monotonic() + TIMEOUT
        while not self.steps():
            assert time.monotonic() < deadline and all(pod.poll() is None for pod in self.started), self.logs()
            time.sleep(0.02)

    def steps(self) -> list[int]:
        """Return the steps that the run has logged so far."""
        folder = self.project / "runs" / "default"
        return [record["step"] for record in records(folder, "train")] if (folder / "metrics.jsonl").exists() else []

    def logs(self) -> str:
        """Return the output of all pods."""
        return "".join((self.project / f"{number}.log").read_text() for number in range(len(self.started)))


@pytest.mark.slow
def test_a_run_continues_with_a_replacement_pod_and_loses_no_step(bake: Bake) -> None:
    """In the remaining pod of the Job, torchrun restarts the ranks when the replacement starts."""
    project = bake(cluster="kubernetes")
    arguments = "--train.max_steps 60 --train.log_every 1 --distributed.device cpu".split()
    with Pods(project, read_documents(project)["Job"], *arguments) as pods:
        remaining, evicted = pods.start(0), pods.start(1)
        pods.wait_for_training()
        evicted.terminate()
        assert evicted.wait(TIMEOUT) not in (0, 2), "the cluster would not replace this pod"
        last_step = max(pods.steps())
        replacement = pods.start(1)
        assert [remaining.wait(TIMEOUT), replacement.wait(TIMEOUT)] == [0, 0], pods.logs()
        assert pods.steps() == list(range(1, 61))
        for line in (f"stopped by SIGTERM after step {last_step};", f"step {last_step} of 60 on 2 rank(s)"):
            assert line in pods.logs()
        assert last_step < 60


@pytest.mark.slow
def test_kubeflow_pods_train_together_and_stop_together(bake: Bake) -> None:
    """With launch.py, no pod of a TrainJob counts as complete after one of them is evicted."""
    project = bake(cluster="kubernetes", launcher="spawn")
    arguments = "--train.epochs 1000 --train.log_every 1 --distributed.device cpu".split()
    with Pods(project, read_documents(project)["TrainJob"], *arguments) as pods:
        remaining, evicted = pods.start(0), pods.start(1)
        pods.wait_for_training()
        evicted.terminate()
        assert (remaining.wait(TIMEOUT), evicted.wait(TIMEOUT)) == (75, 75), pods.logs()
        assert "on 2 rank(s)" in pods.logs() and f"stopped by SIGTERM after step {max(pods.steps())};" in pods.logs()
