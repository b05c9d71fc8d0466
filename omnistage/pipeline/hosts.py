"""What starts the processes of a group of stages."""

from __future__ import annotations

from collections.abc import Callable

from omnistage.config import DeploymentConfig, GroupConfig
from omnistage.placement.worker_process import Host, LocalProcess


def hosts_of(group: GroupConfig, deployment: DeploymentConfig) -> tuple[Callable[[], Host], Callable[[], None]]:
    """What starts a process of a group, and what is called when all of them have been ended."""
    if group.kind != "ray":
        return LocalProcess, lambda: None
    from omnistage.pipeline.ray_host import RayActors

    actors = RayActors(deployment.ray_address, group.replicas, group.num_cpus, group.num_gpus)
    return actors.start, actors.close
