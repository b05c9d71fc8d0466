"""Workers on a cluster, without one: who may connect, whose clock counts, what is said where Ray is missing."""

from __future__ import annotations

import builtins
import socket
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from omnistage.core.errors import MissingDependencyError, StageUnavailableError
from omnistage.core.params import SamplingParams
from omnistage.core.types import ARInput, RequestInfo, StageChunk, StageInput
from omnistage.pipeline import ray_host
from omnistage.pipeline.worker import Worker
from omnistage.placement.clock import boot_id, clock_offset, shifted
from omnistage.placement.messages import Start, Submit


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "ray":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(MissingDependencyError, match=r"omnistage\[ray\]"):
        ray_host.connected_ray(None)


def test_only_who_has_the_token_is_taken_for_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    token = b"t" * 32
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def connect(data: bytes) -> socket.socket:
            client = socket.create_connection(listener.getsockname())
            client.sendall(data)
            return client

        stranger, hasty = connect(b"x" * 32), connect(b"t")
        hasty.shutdown(socket.SHUT_WR)
        ours = connect(token + b"more")
        with ray_host._accepted(listener, token) as accepted:
            assert accepted.recv(4) == b"more"
            assert stranger.recv(1) == b""
        for client in (stranger, hasty, ours):
            client.close()
        monkeypatch.setattr(ray_host, "_CONNECT_SECONDS", 0.05)
        with pytest.raises(TimeoutError):
            ray_host._accepted(listener, token)


class Cluster(ModuleType):
    """What is called of Ray to reserve places."""

    def __init__(self, *, has_room: bool = True) -> None:
        super().__init__("ray")
        self.reserved: list[dict[str, float]] = []
        placement = SimpleNamespace(wait=lambda _seconds: has_room)
        self.util = SimpleNamespace(
            placement_group=lambda bundles, strategy: self.reserved.extend(bundles) or placement,
            remove_placement_group=lambda group: self.reserved.clear() if group is placement else None,
            scheduling_strategies=SimpleNamespace(PlacementGroupSchedulingStrategy=lambda _group, bundle: bundle),
        )

    def is_initialized(self) -> bool:
        return True


class Actor:
    """A host that only has its place."""

    def __init__(self, _ray: object, options: dict[str, Any], leave: Any) -> None:
        self.options, self.kill = options, leave


def test_the_actors_of_a_group_have_places_that_stay_reserved_until_it_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster()
    monkeypatch.setitem(sys.modules, "ray", cluster)
    monkeypatch.setattr(ray_host, "RayHost", Actor)
    actors = ray_host.RayActors(None, 2, num_cpus=0.0, num_gpus=0.5)
    first, second = actors.start(), actors.start()
    assert cluster.reserved == [{"GPU": 0.5}] * 2
    assert first.options == {"num_cpus": 0, "num_gpus": 0.5, "scheduling_strategy": 0}
    with pytest.raises(StageUnavailableError, match="are taken"):
        actors.start()
    second.kill()
    assert actors.start().options["scheduling_strategy"] == 1  # the place of the one that is gone
    actors.close()
    actors.close()
    assert cluster.reserved == []
    assert ray_host.RayActors(None, 1, 0.0, 0.0).start().options["scheduling_strategy"] == "SPREAD"
    assert cluster.reserved == []


def test_a_cluster_without_room_is_told_from_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(has_room=False)
    monkeypatch.setitem(sys.modules, "ray", cluster)
    with pytest.raises(StageUnavailableError, match=r"no room for 3 processes of CPU: 2, GPU: 0\.5 each"):
        ray_host.RayActors("auto", 3, 2.0, 0.5).start()
    assert cluster.reserved == []


def test_times_are_moved_between_machines_and_nowhere_else() -> None:
    assert clock_offset(boot_id(), 5.0) == 0.0
    assert clock_offset("another machine", time.monotonic() - 100.0) == pytest.approx(100.0, abs=5.0)
    info = shifted(RequestInfo("r", deadline=20.0, arrival=10.0), 100.0)
    assert (info.arrival, info.deadline) == (110.0, 120.0)


def test_a_worker_on_another_machine_uses_its_own_clock() -> None:
    here, there = socket.socketpair()
    with here, there:
        worker, submitted, sent = Worker(here), [], []
        now = time.monotonic()
        worker._receive([Start("{}", (), None, None, 1.0, 30, boot="another machine", now=now - 1000.0)])
        worker.links = type("NoLinks", (), {"open": lambda *_: None})()
        loop = type("Loop", (), {"submit": lambda _self, value, _key: submitted.append(value)})()
        worker._loops = {"s": loop}
        stage_input = StageInput(RequestInfo("r", arrival=now - 1000.0), SamplingParams(), ARInput((1,)))
        worker._receive([Submit("s", 1, stage_input)])
        assert submitted[0].info.arrival == pytest.approx(now, abs=5.0)
        worker._channel.send = lambda *messages: sent.extend(messages)  # type: ignore[method-assign]
        worker.send_chunks("s", [(1, StageChunk("r", "s", time=now))])
        assert sent[0].chunks[0].time == pytest.approx(now - 1000.0, abs=5.0)
