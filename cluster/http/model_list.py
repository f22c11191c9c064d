"""GET /v1/models: the models that the caller may use, as OpenAI's API lists them."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from cluster.proto.tandem.v1 import inference_pb2 as pb


class ModelEntry(msgspec.Struct):
    id: str
    created: int
    # A field of vLLM: the limit of prompt and output together.
    max_model_len: int
    object: str = "model"
    owned_by: str = "tandem"


class ModelList(msgspec.Struct):
    data: list[ModelEntry]
    object: str = "list"


def model_of(model: pb.Model, created: int) -> ModelEntry:
    """Return the entry of one model."""
    return ModelEntry(id=model.name, created=created, max_model_len=model.max_context_tokens)


def model_list(models: Iterable[pb.Model], created: int) -> ModelList:
    """Return the entries of all."""
    return ModelList([model_of(model, created) for model in models])
