"""A launcher's place as schedulers tell it in variables."""

from __future__ import annotations

import pytest

from sealring.cli.run import LaunchPlacement, first_host, placement
from sealring.errors import ConfigurationError

SLURM = {
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "31234",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, LaunchPlacement(1, 0, "1", None)),
        (
            {
                "PET_NNODES": "2",
                "PET_NODE_RANK": "1",
                "PET_NPROC_PER_NODE": "auto",
                "PET_MASTER_ADDR": "job-node-0-0.job",
                "PET_MASTER_PORT": "29500",
            },
            LaunchPlacement(2, 1, "auto", "job-node-0-0.job:29500"),
        ),
        ({"PET_NNODES": "2:2", "PET_RDZV_ENDPOINT": "h:1"}, LaunchPlacement(2, 0, "1", "h:1")),
        ({"PET_NPROC_PER_NODE": "4"}, LaunchPlacement(1, 0, "4", None)),
        (SLURM, LaunchPlacement(3, 1, "1", "gpu07:21234")),
        ({**SLURM, "SLURM_GPUS_ON_NODE": "8"}, LaunchPlacement(3, 1, "8", "gpu07:21234")),
        # A batch script's own shell, outside srun, has no place in a job.
        ({"SLURM_JOB_ID": "5", "SLURM_NNODES": "2", "SLURM_NODEID": "0"}, LaunchPlacement()),
        (
            {
                "SKYPILOT_NODE_RANK": "1",
                "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.9",
                "SKYPILOT_NUM_NODES": "2",
                "SKYPILOT_NUM_GPUS_PER_NODE": "4",
            },
            LaunchPlacement(2, 1, "4", "10.0.0.4:29400"),
        ),
    ],
)
def test_a_place(environ: dict[str, str], expected: LaunchPlacement) -> None:
    assert placement(environ) == expected


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[01-03,07],gpu5", "node01"),
        ("rack[2,4]-node[10-11]", "rack2-node10"),
    ],
)
def test_the_first_host_of_a_list(nodelist: str, first: str) -> None:
    assert first_host(nodelist) == first


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"PET_NNODES": "1:4"}, "a fixed number of machines"),
        ({"PET_NNODES": "two"}, "PET_NNODES is 'two'"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "24"}, "--ntasks-per-node=1"),
        ({**SLURM, "SLURM_STEP_NODELIST": ""}, "names no machine"),
    ],
)
def test_a_place_that_cannot_be(environ: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        placement(environ)
