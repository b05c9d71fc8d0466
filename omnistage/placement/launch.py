"""From a group's configuration to its processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from omnistage.config import GroupConfig, OmniEngineArgs
from omnistage.core.params import StageParams
from omnistage.placement.fork_server import ForkServer, supports_forks
from omnistage.placement.group import StageGroup
from omnistage.placement.messages import Start
from omnistage.placement.replicas import Replicas
from omnistage.placement.worker_process import Host, LocalProcess

_log = logging.getLogger(__name__)
_BEATS = 4
"""Signs of life within the time after which a process is taken for hung."""


def make_group(
    name: str,
    group: GroupConfig,
    stages: Mapping[str, type[StageParams]],
    args: OmniEngineArgs,
    host: Callable[[], Host] = LocalProcess,
    release: Callable[[], None] = lambda: None,
    torch_threads: int | None = None,
) -> StageGroup:
    """A group whose processes are being started, and wait until it is told to start as well.

    `release` is called when all of them have been ended for good.
    """
    starts = [
        Start(
            arguments=args.model_dump_json(),
            stages=tuple(stages),
            device=group.devices[number % len(group.devices)] if group.devices else None,
            torch_threads=torch_threads,
            beat_seconds=group.hang_seconds / _BEATS,
            log_level=logging.getLogger("omnistage").getEffectiveLevel(),
        )
        for number in range(group.replicas)
    ]
    replicas = Replicas(
        name,
        starts,
        hang_seconds=group.hang_seconds,
        max_restarts=group.max_restarts,
        host=host,
        release=release,
        fork_server=_fork_server(name, group),
    )
    try:
        replicas.spawn()
    except BaseException:
        replicas.close()
        raise
    return StageGroup(name, stages, replicas, restart_requests=group.restart_requests)


def _fork_server(name: str, group: GroupConfig) -> type[ForkServer] | None:
    if group.standby and not supports_forks():
        _log.warning(
            "standby of group %s needs Linux 5.3 or later: lost processes are not forked but started anew", name
        )
        return None
    return ForkServer if group.standby else None
