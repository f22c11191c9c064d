"""The types of fields that several requests share."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

Int32 = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
# The type of a field that is read and has no effect.
Ignored = Any
# The type of a field that is refused by its type: it is read so that the error names it.
Refused = Any
