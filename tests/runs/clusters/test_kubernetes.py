"""job.yaml and its names are valid for any answers, and its rules match the exit codes of the launcher."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from conftest import Bake, free_ports, launch, read_losses, started, wait_until, weekly
from training import TRAIN

pytestmark = pytest.mark.long


@pytest.mark.parametrize("slug", ["My_Experiment", "null", "a-very-long-name-for-an-experiment-with-33_3-words-in-it"])
@pytest.mark.parametrize("parallelism", ["ddp", "data_parallel"])
def test_documents_are_valid(bake: Bake, slug: str, parallelism: str) -> None:
    project = bake(cluster="kubernetes", project_slug=slug, parallelism=parallelism)
    for document in yaml.safe_load_all((project / "scripts" / "job.yaml").read_text()):
        for version in ("1.29", kubernetes_validate.latest_version()):  # The oldest that job.yaml supports.
            kubernetes_validate.validate(document, version, strict=True)  # No unknown field, and none of another type.
        host = document["metadata"]["name"] + "-99999" * (document["kind"] == "Job")  # Of a pod, at most.
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", host)  # RFC 1035


@pytest.mark.parametrize("launcher", ["torchrun", *weekly("spawn")])
def test_pods_that_stop_are_replaced_and_a_mistake_ends_the_job(baked: Bake, tmp_path: Path, launcher: str) -> None:
    project = baked(cluster="kubernetes", launcher=launcher)
    *_, job = yaml.safe_load_all((project / "scripts" / "job.yaml").read_text())
    rules = job["spec"]["podFailurePolicy"]["rules"]
    actions = {code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {}).get("values", [])}
    assert actions == {143: "Ignore", 2: "FailJob"}
    launch(project, *TRAIN, "--data.global_batch_size", "33", code=2)
    pod = {"NODES": "2", "NPROC": "1", "HEAD": "127.0.0.1", "PORT": str(free_ports(1)[0])}
    words = (project / "scripts" / "launch.sh", *TRAIN, "--run.dir", tmp_path)
    with ExitStack() as stack:
        pods = [stack.enter_context(started(*words, cwd=project, NODE_RANK=rank, **pod)) for rank in ("0", "1")]
        wait_until(lambda: read_losses(tmp_path), "the run has started")
        pods[1].terminate()
        outputs = [pod.communicate(timeout=200) for pod in pods]
    assert [pod.returncode for pod in pods] == [143, 143], outputs
