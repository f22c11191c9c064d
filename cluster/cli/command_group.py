"""The commands of `tandem` that stand in modules of their own, imported when they are run or named in help:
those imports take longer than all that most commands do."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command as command_of

from cluster.cli.suggestions import COMMANDS, OPTIONS

# The module of each command, and what it is called there: a function, or a `Typer` with commands of its own.
_MODULES: Mapping[str, tuple[str, str]] = {
    "serve": ("cluster.cli.serve_command", "serve"),
    "update": ("cluster.cli.update", "update"),
    "traffic": ("cluster.cli.traffic", "traffic"),
    "scale": ("cluster.cli.scale", "scale"),
    "doctor": ("cluster.cli.doctor", "doctor"),
    "quantize": ("cluster.cli.quantize_command", "quantize"),
    "plan": ("cluster.cli.plan_command", "plan"),
    "simulate": ("cluster.bench.simulate_command", "simulate"),
    "bench": ("cluster.bench.bench_command", "cli"),
    "store": ("cluster.cli.store", "cli"),
    "key": ("cluster.cli.key", "cli"),
}


class LazyCommands(TyperGroup):
    """A group whose commands of other modules are imported by their first use."""

    def list_commands(self, ctx: Any) -> list[str]:
        return ["serve", *super().list_commands(ctx), *(name for name in _MODULES if name != "serve")]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command; a usage error names the one that may be meant."""
        name, known = args[0], self.list_commands(ctx)
        if name not in known and not name.startswith("-"):
            close = difflib.get_close_matches(name, known, n=1)
            meant = COMMANDS.get(name) or "".join(close)
            hint = f"Did you mean {meant!r}?" if meant else f"There are {', '.join(known)}."
            ctx.fail(f"No such command {name!r}. {hint}")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in _MODULES and cmd_name not in self.commands:
            module, attribute = _MODULES[cmd_name]
            self.commands[cmd_name] = _command(cmd_name, getattr(importlib.import_module(module), attribute))
        return super().get_command(ctx, cmd_name)


class _Command(TyperCommand):
    """A command that says of an option of another server what does it here."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {name for parameter in self.params for name in parameter.opts}
        for given in (argument.partition("=")[0] for argument in args):
            if given in OPTIONS and given not in own:
                ctx.fail(f"No such option: {given}. Here: {OPTIONS[given]}.")
        return super().parse_args(ctx, args)


def _command(name: str, found: Any) -> Any:
    if not isinstance(found, typer.Typer):
        function, found = found, typer.Typer(add_completion=False)
        found.command(name, cls=_Command)(function)
    command = command_of(found)
    command.name = name
    return command
