"""Settings under `download:` of the cluster's file: how a model is fetched that `model` names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict

from kvtransfer.common.patterns import Matches

_Endpoint = Annotated[str, Matches(r"(https?://[^\s@?#]+)?", "a URL such as https://hub.example")]


class DownloadConfig(BaseModel):
    """Configures how the files of a model come to each host, where `model` is a name or a URL."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Where the files stay, in the layout of the Hugging Face cache; None: HF_HUB_CACHE, else that cache's own
    # place. All processes of a host share it. Relative to the file that names it.
    cache_folder: Path | None = None
    # Fetch nothing: serve only what is in the cache, as with HF_HUB_OFFLINE=1.
    offline: bool = False
    # URL of a mirror of the hub; "": HF_ENDPOINT, else huggingface.co.
    endpoint: _Endpoint = ""
    # Holds the hub's token, for gated and private models, at the same path on every node; None: HF_TOKEN,
    # else what `hf auth login` has kept. Relative to the file that names it.
    token_file: Path | None = None

    def located(self, folder: Path) -> Self:
        """Return a copy whose paths are relative to the folder no more."""
        places = {name: getattr(self, name) for name in ("cache_folder", "token_file")}
        return self.model_copy(
            update={name: folder / path for name, path in places.items() if path is not None}
        )
