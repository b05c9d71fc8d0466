"""The adapters of a running pipeline: by name, over all its stages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from omnistage.config import DeploymentConfig
from omnistage.config.adapters import takes_adapters
from omnistage.core.errors import AdapterError
from omnistage.core.validation import short_repr

if TYPE_CHECKING:
    from omnistage.engines.adapters.library import AdapterLibrary


def adapter_library(stage: str, deployment: DeploymentConfig) -> AdapterLibrary | None:
    """The configured adapters of a stage, which it reads once its network is there; None where it takes none."""
    if not takes_adapters(deployment, stage):
        return None
    from omnistage.engines.adapters.library import AdapterLibrary, AdapterLimits, AdapterSource

    sources = {
        name: AdapterSource(Path(adapter.folder).expanduser(), adapter.scale)
        for name, adapter in deployment.adapters.items()
        if adapter.stage == stage
    }
    limits = AdapterLimits(
        deployment.adapter_slots,
        deployment.adapter_rank,
        deployment.adapter_memory,
        bool(deployment.adapter_folders) and stage == deployment.adapter_stage,
    )
    return AdapterLibrary(stage, sources, limits)


class Adapters:
    """Thread-safe. Adapters of stages in other processes are those of the configuration."""

    def __init__(self, deployment: DeploymentConfig, libraries: Mapping[str, AdapterLibrary]) -> None:
        self._folders = tuple(Path(folder).expanduser() for folder in deployment.adapter_folders)
        self._stage = deployment.adapter_stage or ""
        self._libraries = libraries
        self._elsewhere = {
            name: (adapter.stage or "", Path(adapter.folder))
            for name, adapter in deployment.adapters.items()
            if adapter.stage not in libraries
        }

    def names(self) -> dict[str, tuple[str, Path]]:
        """The stage and folder of each."""
        return self._elsewhere | {
            name: (stage, source.folder)
            for stage, library in self._libraries.items()
            for name, source in library.names().items()
        }

    @property
    def at_run_time(self) -> bool:
        """Whether adapters may be loaded and unloaded while it runs."""
        return bool(self._folders)

    def load(self, name: str, path: str, scale: float = 1.0) -> None:
        """Load an adapter from a configured folder. It reads a file: not for an event loop. Raises `AdapterError`."""
        from omnistage.engines.adapters.files import allowed_folder
        from omnistage.engines.adapters.library import AdapterSource

        library = self._loading()
        if name in self.names():
            raise AdapterError(f"adapter {short_repr(name)} is loaded already; unload it first", param="lora_name")
        source = AdapterSource(allowed_folder(path, self._folders), scale)
        try:
            library.load(name, source)
        except AdapterError as error:
            error.param = error.param or "lora_path"  # what its files lack
            raise

    def unload(self, name: str) -> None:
        """Forget an adapter; requests that use it finish."""
        self._loading()
        stage, _folder = self.names().get(name, (self._stage, None))
        library = self._libraries.get(stage)
        if library is None:
            raise AdapterError(
                f"adapter {short_repr(name)} is of a stage in another process; take it out of the configuration",
                param="lora_name",
            )
        library.unload(name)

    def _loading(self) -> AdapterLibrary:
        if not self.at_run_time:
            raise AdapterError(
                "adapters cannot be loaded or unloaded at run time; start the service with --adapter-folder"
            )
        library = self._libraries.get(self._stage)
        if library is None:
            raise AdapterError(
                f"stage {self._stage!r} runs in another process, where adapters cannot be loaded at run time; "
                "configure them, or run the stage in the service's own process"
            )
        return library
