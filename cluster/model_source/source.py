"""What `model` means on this host: the one place where names become files."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict

from cluster.model_source.cache import cached_path
from cluster.model_source.config import DownloadConfig
from cluster.model_source.fetch_context import FetchContext
from cluster.model_source.names import HubName, ModelName, model_name


class ModelSource(BaseModel):
    """Represents a model by its folder, its name or its URL, and how it is fetched. Crosses processes as
    JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    download: DownloadConfig = DownloadConfig()

    @property
    def name(self) -> ModelName | None:
        """The name or URL; None: `model` is a path."""
        return model_name(self.model)

    @property
    def path(self) -> Path:
        """The folder, or the GGUF file, on this host. That of a name exists once `fetch` has returned."""
        name = self.name
        return Path(self.model) if name is None else cached_path(name, self.download)

    @property
    def served_name(self) -> str:
        """The name by which clients ask for the model, where none is configured."""
        name = self.name
        return Path(self.model).name if name is None else name.served_name

    def fetch(self, context: FetchContext | None = None, *, prefer_cached: bool = False) -> Self:
        """Return the same model, of which a name or URL says which version it is, when its files are on this
        host: other hosts, and later processes, get the same. Every process calls this before it reads a file.

        One process of a host downloads, the others wait. A path is left as it is. With `prefer_cached` a
        branch is what it was when it was last fetched here. `ConfigError` or `StartError` says what to do.
        """
        name = self.name
        if name is None:
            return self
        context = context or FetchContext()
        if isinstance(name, HubName):
            from cluster.model_source.hub import fetch_from_hub  # here: most processes serve a folder

            pinned: ModelName = fetch_from_hub(name, self.download, context, prefer_cached=prefer_cached)
        else:
            from cluster.model_source.urls import fetch_from_url  # here, as above

            pinned = fetch_from_url(name, self.download, context, prefer_cached=prefer_cached)
        return self.model_copy(update={"model": str(pinned)})
