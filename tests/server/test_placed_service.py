"""A service whose model runs in a process of its own: what clients see when that is killed, and when it is back."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx

from omnistage.omni import AsyncOmni
from omnistage.server.access.keys import Keyring
from omnistage.server.service import Service
from tests.server.harness import LONG, SERVE_LIMITS, SHORT, make, serving, until


def test_while_its_process_is_down_and_once_it_is_given_up_a_model_is_unready_and_its_requests_get_503(
    tmp_path: Path,
) -> None:
    group = ("stages=[thinker]", "max_restarts=1")
    overrides = (*SERVE_LIMITS, *(f"deployment.placement.g.{key}" for key in group))
    folder = make("causal_lm", tmp_path / "lm")
    omni = AsyncOmni(folder, device="cpu", dtype="float32", overrides=overrides, progress=False)
    service = Service(keyring=Keyring())
    service.add("lm", omni)
    service.loading = False
    with serving(service) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        before = client.post("/v1/completions", json=SHORT).json()["choices"]
        with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            (replica,) = client.get("/v1/stats").json()["models"]["lm"]["replicas"]
            assert (replica["state"], replica["running"], replica["requests"]) == ("up", 1, 2)
            os.kill(replica["pid"], signal.SIGKILL)
            assert any("ended while it had this request" in line for line in lines)

        until(lambda: client.get("/ready").status_code == 503, "the service being unready")
        ready = client.get("/ready")
        assert ready.json()["stages"] == [{"model": "lm", "stage": "thinker", "state": "unreachable"}]
        refused = client.post("/v1/completions", json=SHORT)
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) > 0
        assert client.get("/health").status_code == 200  # it comes back by itself

        until(lambda: client.get("/ready").status_code == 200, "the process coming back")
        assert client.post("/v1/completions", json=SHORT).json()["choices"] == before

        (replica,) = client.get("/v1/stats").json()["models"]["lm"]["replicas"]
        assert (replica["failures"], replica["restarts"]) == (1, 1)
        os.kill(replica["pid"], signal.SIGKILL)
        until(lambda: client.get("/health").status_code == 503, "the process being given up")
        refused = client.post("/v1/completions", json=SHORT)
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) > 0
        assert client.get("/v1/stats").json()["models"]["lm"]["replicas"][0]["state"] == "failed"
    asyncio.run(omni.shutdown(drain=False))
