"""The same pipeline on a Ray cluster of two nodes: identical speech, and an actor that is killed and comes back."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from omnistage.core.errors import StageUnavailableError
from omnistage.core.params import DiffusionParams
from omnistage.models.stable_diffusion_3 import tiny
from omnistage.omni import Omni
from tests.e2e.harness import SMALL_POOLS, greedy, say, tokens_of
from tests.unit.placement_harness import eventually

ray = pytest.importorskip("ray", reason="needs the extra ray")
pytestmark = pytest.mark.slow
BOTH = ["text", "audio"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    yield cluster.address
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def placed(checkpoint: Path, cluster: str) -> Iterator[Omni]:
    """Talker and vocoder in two actors, one on each node."""
    group = {"stages": "[talker, token2wav]", "kind": "ray", "replicas": "2", "hang_seconds": "30"}
    overrides = [f"deployment.placement.voice.{key}={value}" for key, value in group.items()]
    overrides += [*SMALL_POOLS, f"deployment.ray_address={cluster}"]
    with Omni(checkpoint, device="cpu", dtype="float32", overrides=overrides, progress=False) as omni:
        (reserved,) = reservations()
        yield omni
        omni.orchestrator.check_idle()
        assert reservations() == [reserved]  # it was the same for all actors that came
    assert reservations() == []


def reservations() -> list[str]:
    """The placement groups that there are, each with a node for each of its two bundles."""
    groups = [group for group in ray.util.placement_group_table().values() if group["state"] == "CREATED"]
    assert all(len(set(group["bundles_to_node_id"].values())) == 2 for group in groups)
    return [group["placement_group_id"] for group in groups]


def test_speech_is_the_same_on_every_node_and_over_every_connection(omni: Omni, placed: Omni) -> None:
    families = {worker.host.socket.family.name for worker in placed._groups[0]._replicas.workers()}
    assert families == {"AF_UNIX", "AF_INET"}
    with tokens_of(omni, "talker") as expected_codes:
        expected = omni.chat(say("Hello"), greedy(), modalities=BOTH, progress=False)
    assert len(expected_codes) == 20
    for _ in range(2):
        with tokens_of(placed, "talker") as codes:
            output = placed.chat(say("Hello"), greedy(), modalities=BOTH, progress=False)
        assert codes == expected_codes
        assert output.token_ids == expected.token_ids
        assert output.audio is not None
        assert expected.audio is not None
        np.testing.assert_array_equal(output.audio.samples, expected.audio.samples)
        assert output.trace is not None
        stages = output.trace.stages.values()
        assert all(stage.first_chunk is not None and 0 < stage.first_chunk < 60 for stage in stages)
    assert [replica.requests for replica in placed.replicas()] == [1, 1]


def test_an_actor_speaks_while_the_service_still_writes(placed: Omni) -> None:
    output = placed.chat(say("Tell me a long story."), greedy(800, 60), modalities=BOTH, progress=False)
    assert output.trace is not None
    talker, thinker = output.trace.stages["talker"], output.trace.stages["thinker"]
    assert talker.first_chunk is not None
    assert thinker.last_chunk is not None
    assert talker.first_chunk < thinker.last_chunk  # the sound itself may come late: Ray runs actors at niceness 15


def test_pictures_are_the_same_in_an_actor(tmp_path: Path, cluster: str, placed: Omni) -> None:
    del placed  # it is connected to the cluster, which this one then uses as well
    tiny.write(tmp_path / "sd3", seed=5)

    def draw(*overrides: str) -> np.ndarray:
        params = DiffusionParams(width=64, height=64, steps=4, seed=3)
        with Omni(tmp_path / "sd3", device="cpu", dtype="float32", overrides=overrides, progress=False) as omni:
            (output,) = omni.generate(["a red square"], {"denoise": params}, progress=False)
        return output.images[0].pixels

    group = ("stages=[denoise, decode]", "kind=ray", "hang_seconds=30", "num_cpus=0")
    there = draw(*(f"deployment.placement.drawing.{key}" for key in group), f"deployment.ray_address={cluster}")
    np.testing.assert_array_equal(there, draw())


def test_an_actor_that_dies_ends_its_own_requests_alone_and_comes_back(placed: Omni) -> None:
    stream = placed.stream_chat(say("Tell me a story."), greedy(40, 2000), modalities=BOTH)
    while next(stream).audio is None:
        pass
    (fallen,) = (replica for replica in placed.replicas() if replica.running)
    assert fallen.pid is not None
    os.kill(fallen.pid, signal.SIGKILL)
    with pytest.raises(StageUnavailableError, match="ended while it had this request"):
        for _item in stream:
            pass
    placed.chat(say("Hello"), greedy(), modalities=BOTH, progress=False)
    eventually(lambda: placed.replicas()[fallen.number].pid not in (None, fallen.pid), 120)
    risen = placed.replicas()[fallen.number]
    assert (risen.failures, risen.restarts) == (1, 1)
    for _ in range(2):
        placed.chat(say("Hello"), greedy(), modalities=BOTH, progress=False)
    assert placed.replicas()[fallen.number].requests > fallen.requests
