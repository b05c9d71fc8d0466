"""`transformers`, imported once its optional torchvision has been made importable. Always import it from here."""

from __future__ import annotations

from omnistage.compat import prepare_torchvision

prepare_torchvision(required=False)

import transformers  # noqa: E402  (importing almost anything of it imports torchvision where that is installed)

__all__ = ["transformers"]
