"""What cluster=kubernetes ships: valid under the schemas that Kubernetes and Kubeflow publish, and of one piece."""

from __future__ import annotations

import copy
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from conftest import CHOICES, Bake
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob
from runs import records

Document = dict[str, Any]

PATIENCE = 600.0  # Seconds, for what takes some ten on a machine that has nothing else to do.
VERSIONS = ["1.29", kubernetes_validate.latest_version()]  # The oldest that job.yaml names, and the newest.
LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")  # RFC 1035, as the API asks for it.
PLACE = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
every_project = pytest.mark.parametrize(
    ("parallelism", "launcher"), [(p, launcher) for p in CHOICES["parallelism"] for launcher in CHOICES["launcher"]]
)


def read(project: Path) -> dict[str, Document]:
    """The documents in scripts/, by kind."""
    paths = sorted((project / "scripts").glob("*.yaml"))
    found = [document for path in paths for document in yaml.safe_load_all(path.read_text())]
    by_kind = {document["kind"]: document for document in found}
    assert len(by_kind) == len(found)
    return by_kind


def is_valid(document: Document, version: str) -> bool:
    """Whether the API would take a document: no field that it does not know, none of another type."""
    if document["kind"] == "TrainJob":  # Kubeflow's types drop what they do not know.
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
    documents = read(baked(cluster="kubernetes", parallelism=parallelism, launcher=launcher))
    service = {"Service"} if parallelism != "data_parallel" else set()
    assert documents.keys() == {"PersistentVolumeClaim", "Job", "TrainJob"} | service
    for document in documents.values():
        for version in VERSIONS:
            assert is_valid(document, version), document["kind"]


# What is beneath these is the user's: any name is valid.
FREE = {"selector", "limits", "requests"}


def misspelt(node: Any) -> Iterator[None]:
    """Spell one key after the other wrong, in place, and right again."""
    if isinstance(node, list):
        for item in node:
            yield from misspelt(item)
    elif isinstance(node, dict):
        for key in list(node):
            value = node.pop(key)
            node[f"{key}s"] = value
            yield
            del node[f"{key}s"]
            node[key] = value
            if key not in FREE:
                yield from misspelt(value)


def test_a_key_that_is_misspelt_anywhere_is_found(baked: Bake) -> None:
    """That the test above can fail, for every key of every document."""
    count = 0
    for document in read(baked(cluster="kubernetes")).values():
        changed = copy.deepcopy(document)
        for section in ("metadata", "spec"):
            for _ in misspelt(changed[section]):
                count += 1
                assert not is_valid(changed, VERSIONS[-1]), yaml.safe_dump(changed)
        assert changed == document
    assert count > 100


def pod(document: Document) -> Document:
    """The pod of a Job; of a TrainJob, what is added to the pod of its runtime."""
    spec = document["spec"]
    if document["kind"] == "TrainJob":
        job = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
        assert spec["runtimeRef"] == {"name": "torch-distributed"} and job["name"] == "node"
        spec = job["template"]["spec"]
    return spec["template"]["spec"]


def container(document: Document) -> Document:
    """The container that trains, as the cluster starts it."""
    (only,) = pod(document)["containers"]
    if document["kind"] == "TrainJob":
        assert only["name"] == "node"
        return only | document["spec"]["trainer"] | {"resources": document["spec"]["trainer"]["resourcesPerNode"]}
    return only


def environment(document: Document) -> dict[str, str]:
    """The variables of the container; of those that the cluster fills in, where from."""
    found = {}
    for entry in container(document)["env"]:
        found[entry["name"]] = entry["value"] if "value" in entry else entry["valueFrom"]["fieldRef"]["fieldPath"]
    return found


@pytest.mark.parametrize("kind", ["Job", "TrainJob"])
@every_project
def test_a_pod_has_what_training_needs(baked: Bake, parallelism: str, launcher: str, kind: str) -> None:
    documents = read(baked(cluster="kubernetes", parallelism=parallelism, launcher=launcher))
    spec, train, variables = pod(documents[kind]), container(documents[kind]), environment(documents[kind])
    mounts = {mount["mountPath"]: mount["name"] for mount in train["volumeMounts"]}
    volumes = {volume.pop("name"): volume for volume in copy.deepcopy(spec["volumes"])}
    assert mounts.keys() == {"/app/runs", "/dev/shm"} and set(mounts.values()) == volumes.keys()
    claim = documents["PersistentVolumeClaim"]
    assert volumes[mounts["/app/runs"]] == {"persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}}
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert train["resources"]["limits"]["nvidia.com/gpu"] >= 2
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["fsGroup"]
    # A save is given longer than by default, and the launcher ends before the cluster kills it.
    assert 120 <= int(variables["STOP_SECONDS"]) < spec["terminationGracePeriodSeconds"]
    assert ("MAX_RESTARTS" in variables) == (launcher == "torchrun")
    assert variables.get("STOP_CODE") == (None if parallelism == "data_parallel" else "75")


@pytest.mark.parametrize("parallelism", [p for p in CHOICES["parallelism"] if p != "data_parallel"])
def test_the_pods_of_a_job_find_each_other(baked: Bake, parallelism: str) -> None:
    documents = read(baked(cluster="kubernetes", parallelism=parallelism))
    service, job, variables = documents["Service"], documents["Job"], environment(documents["Job"])
    name = job["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}  # The Job's controller sets it.
    assert pod(job)["subdomain"] == service["metadata"]["name"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(variables["NODES"]) == 2
    assert variables["HEAD"] == f"{name}-0.{service['metadata']['name']}"
    assert (variables["NODE_RANK"], variables["LOCAL_ADDR"]) == (PLACE, "status.podIP")


@pytest.mark.parametrize("launcher", CHOICES["launcher"])
def test_pods_are_replaced_unless_that_would_not_help(baked: Bake, launcher: str) -> None:
    job = read(baked(cluster="kubernetes", launcher=launcher))["Job"]
    taken, mistaken, *stopped = job["spec"]["podFailurePolicy"]["rules"]
    codes = {"containerName": container(job)["name"], "operator": "In"}
    assert taken == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert mistaken == {"action": "FailJob", "onExitCodes": codes | {"values": [2]}}
    # launch.py ends as its ranks do; torchrun stays, and starts them again.
    code = int(environment(job)["STOP_CODE"])
    assert stopped == ([{"action": "Ignore", "onExitCodes": codes | {"values": [code]}}] if launcher == "spawn" else [])
    assert pod(job)["restartPolicy"] == "Never"  # The API refuses the policy with any other.


@pytest.mark.parametrize("slug", ["My_Experiment", "null", "a-very-long-name-for-an-experiment-with-33_3-words-in-it"])
def test_names_are_such_as_the_cluster_takes(bake: Bake, slug: str) -> None:
    project = bake(project_slug=slug, cluster="kubernetes", docker=True)
    documents = read(project)
    for document in documents.values():
        assert LABEL.fullmatch(document["metadata"]["name"])
        assert is_valid(document, VERSIONS[-1])
    # The host names of pods: a pod of the Job, and one of the TrainJob.
    assert LABEL.fullmatch(f"{documents['Job']['metadata']['name']}-99999")
    assert LABEL.fullmatch(f"{documents['TrainJob']['metadata']['name']}-node-0-99999")
    # Images are named in small letters.
    texts = (project / "Dockerfile").read_text() + (project / "README.md").read_text()
    tags = re.findall(r"docker build -t (\S+)", texts)
    assert len(tags) == 3 and all(re.fullmatch(r"[a-z0-9./-]+", tag) for tag in tags)


class Pods:
    """Pods of a run, on this machine: each is the command of its container, in its environment.

    Args:
        project: The rendered project, in place of the image.
        document: The Job or the TrainJob.
        words: Further words for its command.
    """

    def __init__(self, project: Path, document: Document, *words: str) -> None:
        self.project, self.document, self.words = project, document, words
        self.started: list[subprocess.Popen[str]] = []
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            self.port = str(server.getsockname()[1])

    def __enter__(self) -> Pods:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.started:
            each.kill()  # Its ranks end with it.

    def start(self, index: int) -> subprocess.Popen[str]:
        """Start a pod; what the cluster fills in is filled in here."""
        train = container(self.document)
        here = {PLACE: str(index), "status.podIP": "127.0.0.1"}
        variables = {name: here.get(value, value) for name, value in environment(self.document).items()}
        words = [*train["args"], *self.words]
        if self.document["kind"] == "TrainJob":
            # https://github.com/kubeflow/trainer/blob/v2.3.0/pkg/runtime/framework/plugins/torch/torch.go
            variables |= {"PET_NNODES": str(train["numNodes"]), "PET_NODE_RANK": str(index)}
            variables |= {"PET_NPROC_PER_NODE": "auto", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": self.port}
            words = [" ".join(words)]  # For a shell.
        else:
            variables |= {"HEAD": "127.0.0.1", "PORT": self.port}
        variables |= {"NPROC": "1", "PYTHON": sys.executable, "GLOO_SOCKET_IFNAME": "lo"}
        command, log = [*train["command"], *words], self.project / f"{len(self.started)}.log"
        with open(log, "w") as file:
            pod = subprocess.Popen(command, cwd=self.project, env=os.environ | variables, stdout=file, stderr=file)
        self.started.append(pod)
        return pod

    def wait_for_training(self) -> None:
        """Wait until the first steps are done."""
        give_up = time.monotonic() + PATIENCE
        while not self.steps():
            assert time.monotonic() < give_up and all(pod.poll() is None for pod in self.started), self.logs()
            time.sleep(0.02)

    def steps(self) -> list[int]:
        """The steps that were trained so far."""
        folder = self.project / "runs" / "default"
        return [record["step"] for record in records(folder, "train")] if (folder / "metrics.jsonl").exists() else []

    def logs(self) -> str:
        return "".join((self.project / f"{number}.log").read_text() for number in range(len(self.started)))


@pytest.mark.slow
def test_a_pod_that_is_taken_away_is_replaced_and_no_step_is_lost(bake: Bake) -> None:
    """The Job's pods under torchrun: the one that stays starts its ranks again when the new one is there."""
    project = bake(cluster="kubernetes")
    words = "--train.max_steps 60 --train.log_every 1 --distributed.device cpu".split()
    with Pods(project, read(project)["Job"], *words) as pods:
        staying, taken = pods.start(0), pods.start(1)
        pods.wait_for_training()
        taken.terminate()
        assert taken.wait(PATIENCE) not in (0, 2), "the cluster replaces it"
        done = max(pods.steps())
        new = pods.start(1)
        assert [staying.wait(PATIENCE), new.wait(PATIENCE)] == [0, 0], pods.logs()
        assert pods.steps() == list(range(1, 61))
        for line in (f"stopped by SIGTERM after step {done};", f"step {done} of 60 on 2 rank(s)"):
            assert line in pods.logs()
        assert done < 60


@pytest.mark.slow
def test_pods_under_kubeflow_train_together_and_stop_together(bake: Bake) -> None:
    """The TrainJob's pods under launch.py: none of them is taken for done when one is taken away."""
    project = bake(cluster="kubernetes", launcher="spawn")
    words = "--train.epochs 1000 --train.log_every 1 --distributed.device cpu".split()
    with Pods(project, read(project)["TrainJob"], *words) as pods:
        staying, taken = pods.start(0), pods.start(1)
        pods.wait_for_training()
        taken.terminate()
        assert (staying.wait(PATIENCE), taken.wait(PATIENCE)) == (75, 75), pods.logs()
        assert "on 2 rank(s)" in pods.logs() and f"stopped by SIGTERM after step {max(pods.steps())};" in pods.logs()
