"""The options of `tandem generate` and `tandem chat` that say how an answer is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from cluster.api.generate_options import GenerateOptions
from cluster.cli.gateway_options import spliced_options


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen, when an answer ends, and whose request it is."""

    model: Annotated[str, typer.Option(help="The served model's name; default: the one that is served.")] = ""
    max_tokens: Annotated[int | None, typer.Option(help="Of an answer.")] = None
    min_tokens: Annotated[int | None, typer.Option()] = None
    temperature: Annotated[float | None, typer.Option(help="0: greedy.")] = None
    top_k: Annotated[int | None, typer.Option()] = None
    top_p: Annotated[float | None, typer.Option()] = None
    min_p: Annotated[float | None, typer.Option()] = None
    repetition_penalty: Annotated[float | None, typer.Option()] = None
    presence_penalty: Annotated[float | None, typer.Option()] = None
    frequency_penalty: Annotated[float | None, typer.Option()] = None
    seed: Annotated[int | None, typer.Option()] = None
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None
    stop_token_id: Annotated[list[int] | None, typer.Option(help="May be repeated.")] = None
    ignore_eos: Annotated[bool | None, typer.Option("--ignore-eos")] = None
    priority: Annotated[int, typer.Option(help="Higher goes first.")] = 0
    service_class: Annotated[
        str, typer.Option(help="interactive, standard or batch; default: that of the tenant.")
    ] = ""
    tenant: Annotated[
        str, typer.Option(help="Prefixes are shared within a tenant only; where callers are known, theirs.")
    ] = ""

    def generate_options(self, **others: Any) -> GenerateOptions:
        """Return the options of a request, with `others` beside these."""
        return GenerateOptions(
            model=self.model,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=self.seed,
            stop=self.stop or (),
            stop_token_ids=self.stop_token_id or (),
            ignore_eos=self.ignore_eos,
            priority=self.priority,
            service_class=self.service_class,
            tenant=self.tenant,
            **others,
        )


def sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options in the fields of its one parameter that is `SamplingOptions`."""
    return spliced_options(command, SamplingOptions)
