"""The starter's weights: where they are, and what fetches them."""

from __future__ import annotations

from pathlib import Path

from omnistage.core.errors import CheckpointError
from omnistage_starter.parts.manifest import STARTER
from omnistage_starter.parts.store import Store


class StarterBundle:
    """What `omnistage pull starter` fetches."""

    name = STARTER.name

    def locate(self) -> Path:
        """The folder that was pulled; parts that the starter can do without may be missing."""
        store = Store.of(STARTER)
        missing = [part.title for part in store.missing()]
        if missing or not (store.root / "config.json").is_file():
            names = f" ({', '.join(missing)})" if missing else ""
            raise CheckpointError(
                f"{self.name} is not here yet{names}; run `omnistage pull {self.name}` once", param="model"
            )
        return store.root
