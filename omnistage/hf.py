"""`transformers`, imported once its optional torchvision has been made importable. Always import it from here."""

from __future__ import annotations

from omnistage.compat import import_without, prepare_torchvision, silence_torchao

prepare_torchvision(required=False)
silence_torchao()

import transformers  # noqa: E402  (importing almost anything of it imports torchvision where that is installed)

# Older versions (5.17) import scikit-learn, which takes a second, for a way of assisted generation nobody uses here.
import_without("sklearn", "transformers.generation.candidate_generator")

__all__ = ["transformers"]
