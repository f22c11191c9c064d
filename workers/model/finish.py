"""What is done with the sums of a product on CUDA, in the product's own kernel."""

from __future__ import annotations

from typing import Literal

# They are stored, added, or the activation of the first half is multiplied by the second half.
Finish = Literal["store", "add", "silu", "gelu_tanh"]
