"""Read the sizes of a model's tensors, of a folder or of a GGUF file, which is not converted for that."""

from __future__ import annotations

from pathlib import Path

from workers.model.gguf.gguf_file import GgufFile, is_gguf
from workers.model.gguf.gguf_names import written_tensors
from workers.model.rank_memory import Checkpoint


def checkpoint_of(model: Path) -> Checkpoint:
    """Read the headers of the model's files. Raises `CheckpointError`, naming the file, for one that cannot
    be read."""
    if not is_gguf(model):
        return Checkpoint.read(model)
    from workers.model.gguf.gguf_forms import kept_forms  # here: it imports what reads all types

    tensors = written_tensors(GgufFile.read(model))
    return Checkpoint({tensor.name: tensor.num_items for tensor in tensors}, kept_forms(tensors))
