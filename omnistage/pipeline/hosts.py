"""What starts the processes of a group of stages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from omnistage.config import DeploymentConfig, GroupConfig
from omnistage.placement.worker_process import Host, LocalProcess


def host_of(group: GroupConfig, deployment: DeploymentConfig) -> Callable[[], Host]:
    """What starts the processes of a group."""
    if group.kind != "ray":
        return LocalProcess
    from omnistage.pipeline.ray_host import RayHost

    return partial(RayHost, deployment.ray_address, group.num_cpus, group.num_gpus)
