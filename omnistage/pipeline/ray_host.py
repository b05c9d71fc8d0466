"""Workers on a Ray cluster: an actor for each process of a group, on any node.

Ray places and ends them. What a request needs goes over a connection of our own, which also tells whether they live: a
Unix socket where the actor is on the node of the service, TCP elsewhere.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from omnistage.core.errors import MissingDependencyError, StageUnavailableError
from omnistage.pipeline.worker import Worker

_PLACE_SECONDS = 300.0
"""For the cluster to find room for an actor and start it."""
_CONNECT_SECONDS = 30.0
_TOKEN_BYTES = 32

Address = str | tuple[str, int]
"""Of a Unix socket, or of TCP."""


class WorkerActor:
    """What runs on a node of the cluster: one worker, whose end is the process's own."""

    def node(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def connect(self, address: Address, token: bytes) -> int:
        """Work for the service at this address from now on; the id of this process."""
        sock = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
        sock.settimeout(_CONNECT_SECONDS)
        sock.connect(address)
        sock.sendall(token)
        sock.settimeout(None)
        threading.Thread(target=lambda: os._exit(Worker(sock).run()), name="omnistage-worker", daemon=True).start()
        return os.getpid()


class RayActors:
    """Starts the actors of a group. What they need is reserved together, spread over the nodes, in a placement group:
    an actor that is lost leaves its place to the next one."""

    def __init__(self, address: str | None, count: int, num_cpus: float, num_gpus: float) -> None:
        self._address = address
        self._bundle = {name: number for name, number in (("CPU", num_cpus), ("GPU", num_gpus)) if number}
        self._count = count
        self._lock = threading.Lock()  # guards what follows
        self._placement: Any = None
        self._free: list[int] = []
        """Bundles of the placement group that no actor is in."""

    def start(self) -> RayHost:
        """Raises `StageUnavailableError` where the cluster has no room."""
        ray = connected_ray(self._address)
        if not self._bundle:  # nothing to reserve
            return RayHost(ray, {"num_cpus": 0, "scheduling_strategy": "SPREAD"}, lambda: None)
        with self._lock:
            if self._placement is None:
                self._placement, self._free = self._reserve(ray), list(range(self._count))
            if not self._free:
                raise StageUnavailableError("all places of this group on the Ray cluster are taken")
            bundle = self._free.pop(0)
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._placement, bundle)
        options = {
            "num_cpus": self._bundle.get("CPU", 0),
            "num_gpus": self._bundle.get("GPU", 0),
            "scheduling_strategy": strategy,
        }
        return RayHost(ray, options, partial(self._leave, bundle))

    def _reserve(self, ray: ModuleType) -> object:
        placement = ray.util.placement_group([self._bundle] * self._count, strategy="SPREAD")
        if not placement.wait(_PLACE_SECONDS):
            ray.util.remove_placement_group(placement)
            needs = ", ".join(f"{name}: {number:g}" for name, number in self._bundle.items())
            raise StageUnavailableError(
                f"the Ray cluster has no room for {self._count} processes of {needs} each; see `ray status`"
            )
        return placement

    def _leave(self, bundle: int) -> None:
        with self._lock:
            self._free.append(bundle)

    def close(self) -> None:
        """Reserve nothing any more; after the actors have been ended."""
        with self._lock:
            placement, self._placement = self._placement, None
        if placement is None:
            return
        import ray

        if ray.is_initialized():  # or the call would start a cluster
            ray.util.remove_placement_group(placement)


class RayHost:
    """An actor that holds a worker, connected. Raises `StageUnavailableError` where the cluster cannot start it."""

    def __init__(self, ray: ModuleType, options: Mapping[str, Any], leave: Callable[[], None]) -> None:
        """`leave` is called once, when the actor needs its place no more."""
        self._ray = ray
        self._leave = weakref.finalize(self, leave)
        self._leave.atexit = False
        self._actor: Any = ray.remote(WorkerActor).options(max_restarts=0, **options).remote()
        try:
            node = ray.get(self._actor.node.remote(), timeout=_PLACE_SECONDS)
            self.socket, self.pid = self._connect(local=node == ray.get_runtime_context().get_node_id())
        except (ray.exceptions.RayError, OSError) as error:
            self.kill()
            raise StageUnavailableError(
                f"the Ray cluster has not started a process ({type(error).__name__}); see `ray status`"
            ) from error

    def _connect(self, *, local: bool) -> tuple[socket.socket, int]:
        token = secrets.token_bytes(_TOKEN_BYTES)
        with ExitStack() as files:
            listener = files.enter_context(socket.socket(socket.AF_UNIX if local else socket.AF_INET))
            address: Address
            if local:
                address = str(Path(files.enter_context(tempfile.TemporaryDirectory(prefix="omnistage-"))) / "socket")
                listener.bind(address)
            else:
                listener.bind((self._ray.util.get_node_ip_address(), 0))
                address = listener.getsockname()
            listener.listen()
            pid = self._actor.connect.remote(address, token)
            return _accepted(listener, token), int(self._ray.get(pid, timeout=_CONNECT_SECONDS))

    def kill(self) -> None:
        try:
            if self._ray.is_initialized():  # or the call would start a cluster
                self._ray.kill(self._actor)
        except self._ray.exceptions.RayError:
            return  # it, or the cluster, is gone
        finally:
            self._leave()

    def wait(self, seconds: float) -> int | None:
        """Ray does not tell how an actor's process ended."""
        return None


def _accepted(listener: socket.socket, token: bytes) -> socket.socket:
    """The first connection that sends the token; others are closed. Raises `TimeoutError`."""
    end = time.monotonic() + _CONNECT_SECONDS
    while True:
        listener.settimeout(max(end - time.monotonic(), 0.001))
        connection, _ = listener.accept()
        connection.settimeout(max(end - time.monotonic(), 0.001))
        received = b""
        while len(received) < _TOKEN_BYTES and (piece := connection.recv(_TOKEN_BYTES - len(received))):
            received += piece
        if hmac.compare_digest(received, token):
            connection.settimeout(None)
            return connection
        connection.close()


def connected_ray(address: str | None) -> ModuleType:
    """Ray, connected to a cluster: the one at `address`, that of RAY_ADDRESS, or a new one on this machine."""
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError("kind: ray needs another package: pip install 'omnistage[ray]'") from error
    if not ray.is_initialized():
        ray.init(address=address, namespace="omnistage", log_to_driver=False)
    module: ModuleType = ray
    return module
