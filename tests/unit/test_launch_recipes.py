"""The launch recipes, as far as they can be tried without a cluster: what they start, and what exit codes lead to."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "examples" / "launch"
TRAIN_OPTIONS = set(json.loads((ROOT / "tests" / "assets" / "command_line.json").read_text())["train"])


def _program(path: Path, text: str) -> None:
    path.write_text("#!/usr/bin/env bash\n" + text)
    path.chmod(0o755)


def _run(words: list[str | Path], folder: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    """A script that finds the programs of ``folder`` first."""
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder), **variables}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)


def _begin(folder: Path) -> str:
    """A run with a checkpoint, as a training leaves it."""
    checkpoints = folder / "run" / "1" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "step-00000100.safetensors").touch()
    return str(folder / "run")


def test_a_rank_begins_a_run_and_goes_on_with_it(tmp_path: Path) -> None:
    _program(tmp_path / "python", 'echo "$@"\n')
    words: list[str | Path] = [LAUNCH / "begin_or_resume.sh", "g.gsplit", str(tmp_path / "run"), "--save-every", "500"]
    (tmp_path / "run" / "1").mkdir(parents=True)  # cut off before its first checkpoint: gsplit train begins it again
    first = _run(words, tmp_path).stdout.split()
    assert first == ["-m", "gsplit", "train", "g.gsplit", "--out", str(tmp_path / "run"), "--save-every", "500"]
    run = _begin(tmp_path / "second")
    again = _run([words[0], "g.gsplit", run], tmp_path).stdout.split()
    assert again == ["-m", "gsplit", "train", "g.gsplit", "--resume", run]


def test_torchrun_understands_what_a_host_starts(tmp_path: Path) -> None:
    _program(tmp_path / "python", 'printf "%s\\n" "$@"\n')
    words: list[str | Path] = [LAUNCH / "torchrun_hosts.sh", "4", "g.gsplit", _begin(tmp_path), "--replicas", "2"]
    done = _run(words, tmp_path, HOST="1", HOSTS="2", MASTER_ADDR="10.0.0.1")
    said = done.stdout.splitlines()
    assert said[:2] == ["-m", "torch.distributed.run"]
    parsed = get_args_parser().parse_args(said[2:])
    assert (parsed.nnodes, parsed.node_rank, parsed.nproc_per_node) == ("2", 1, "4")
    assert (parsed.rdzv_backend, parsed.master_addr, parsed.max_restarts) == ("static", "10.0.0.1", 3)
    assert parsed.module and parsed.training_script == "gsplit"
    assert parsed.training_script_args[:3] == ["train", "g.gsplit", "--resume"]
    assert _run(words, tmp_path, HOSTS="2", MASTER_ADDR="10.0.0.1").returncode != 0  # which host is it?


@pytest.mark.parametrize("code", [0, 2, 75])
def test_a_slurm_job_goes_back_into_the_queue_after_75_only(code: int, tmp_path: Path) -> None:
    """With programs that do what srun and scontrol do for two tasks."""
    (tmp_path / "launch").mkdir()
    text = 'echo "$RANK of $WORLD_SIZE at $MASTER_ADDR, $LOCAL_RANK of $LOCAL_WORLD_SIZE: $*" >> tasks\n'
    text += f"kill -TERM $PPID\nexit {code}\n"
    _program(tmp_path / "launch" / "begin_or_resume.sh", text)
    tasks = (
        'while [[ $1 == --* ]]; do shift; done\nfor task in 0 1; do\n  SLURM_PROCID=$task SLURM_LOCALID=$task "$@"\n'
    )
    _program(tmp_path / "srun", tasks + "  code=$?; echo $code >> codes\ndone\nexit $code\n")
    _program(tmp_path / "scontrol", 'if [ "$1" = show ]; then echo node7; echo node8; else echo "$@" >> requeued; fi\n')
    slurm = {"JOB_ID": "123456", "JOB_NODELIST": "node[7-8]", "NTASKS": "2", "NTASKS_PER_NODE": "1"}
    variables = {f"SLURM_{name}": value for name, value in (slurm | {"CPUS_PER_TASK": "4"}).items()}
    words: list[str | Path] = ["bash", LAUNCH / "slurm.sbatch", "g.gsplit", "run", "--replicas", "2"]
    done = _run(words, tmp_path, GSPLIT_LAUNCH=str(tmp_path / "launch"), SLURM_SUBMIT_DIR=str(tmp_path), **variables)
    assert done.returncode == code, done.stderr
    lines = (tmp_path / "tasks").read_text().splitlines()
    assert lines == [f"{rank} of 2 at node7, {rank} of 1: g.gsplit run --replicas 2" for rank in (0, 1)]
    seen = (tmp_path / "codes").read_text().split()
    assert seen == ["0" if code == 75 else str(code)] * 2  # srun kills the other tasks after any other
    assert not list(tmp_path.glob("*.saved"))
    requeued = tmp_path / "requeued"
    assert (requeued.read_text().split() if requeued.exists() else []) == (["requeue", "123456"] if code == 75 else [])


def test_the_kubernetes_job_has_the_fields_of_its_schema() -> None:
    """Those of kubeflow.org/v1 PyTorchJob (training operator 1.9) and of a pod, as far as they are used."""
    job, policy = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec = job["spec"]
    assert spec.keys() <= {"runPolicy", "elasticPolicy", "pytorchReplicaSpecs", "nprocPerNode"}
    run_policy = {"activeDeadlineSeconds", "backoffLimit", "cleanPodPolicy", "ttlSecondsAfterFinished", "suspend"}
    assert spec["runPolicy"].keys() <= run_policy
    assert spec["runPolicy"]["cleanPodPolicy"] in {"None", "Running", "All"}
    replicas = spec["pytorchReplicaSpecs"]
    assert {name: replica["replicas"] for name, replica in replicas.items()} == {"Master": 1, "Worker": 3}
    for replica in replicas.values():
        assert replica.keys() == {"replicas", "restartPolicy", "template"}
        assert replica["restartPolicy"] == "OnFailure"  # ExitCode gives up after 75
        _check_pod(replica["template"]["spec"])
    label = {"matchLabels": {"training.kubeflow.org/job-name": job["metadata"]["name"]}}
    assert policy["spec"]["podSelector"] == policy["spec"]["ingress"][0]["from"][0]["podSelector"] == label


def _check_pod(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"  # or the operator does not set RANK and the others
    assert container["command"] == ["bash", "/launch/begin_or_resume.sh"]
    assert all(isinstance(word, str) for word in container["args"])  # Kubernetes refuses numbers
    assert {word for word in container["args"] if word.startswith("--")} <= TRAIN_OPTIONS
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert pod["terminationGracePeriodSeconds"] > 30  # what gsplit gives its ranks to save
