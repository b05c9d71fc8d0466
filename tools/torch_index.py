"""The option with which pip finds PyTorch's CPU builds, for `make install` on machines without an NVIDIA GPU.

    python tools/torch_index.py https://download.pytorch.org/whl/cpu

On PyPI the torch for Linux is the one for CUDA, with gigabytes of packages beside it. PyTorch's own index has the same
version as `2.13.0+cpu`, which pip takes for the newer one and the constraint `torch==2.13.0` allows. Prints nothing
where the index cannot be reached: pip then takes what its own indexes have.
"""

from __future__ import annotations

import http.client
import sys
import urllib.error
import urllib.request

_TIMEOUT = 5.0
"""Seconds: a network that answers nobody must not hold an installation up."""


def option(url: str, platform: str) -> str | None:
    """The option for pip; None where there is none to give. Other systems get a CPU build from PyPI."""
    if not url or platform != "linux":
        return None
    request = urllib.request.Request(f"{url.rstrip('/')}/torch/", method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT):
            return f"--extra-index-url {url}"
    except (OSError, ValueError, http.client.HTTPException) as error:  # no network, host, page or URL, or no HTTP there
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        print(
            f"{url} cannot be reached ({reason}): torch comes from pip's own indexes. If that is a build for CUDA, set "
            "TORCH_CPU_INDEX to an index that has CPU builds.",
            file=sys.stderr,
        )
        return None


if __name__ == "__main__":
    print(option(sys.argv[1] if len(sys.argv) > 1 else "", sys.platform) or "", end="")
