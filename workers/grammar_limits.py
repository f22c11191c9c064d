"""The limits of a grammar's cost, for gateways, which refuse it, and ranks, which apply it.

The library stops with an error of its own where a grammar exceeds them. At its authors' rates (50,000 units
of fuel a millisecond at first, 14,000 in a step; 20,000 items a millisecond; up to 2 kB a lexer state) a
grammar takes at most 40 ms and 60 MB to begin with, and 6 ms a step.
"""

from __future__ import annotations

from llguidance import LLParserLimits

_INITIAL_FUEL = 2_000_000
_STEP_FUEL = 50_000
_STEP_ITEMS = 50_000
_MAX_STATES = 30_000
_MAX_SYMBOLS = 200_000


def parser_limits() -> LLParserLimits:
    """Return the limits of one grammar."""
    return LLParserLimits(
        initial_lexer_fuel=_INITIAL_FUEL,
        step_lexer_fuel=_STEP_FUEL,
        step_max_items=_STEP_ITEMS,
        max_lexer_states=_MAX_STATES,
        max_grammar_size=_MAX_SYMBOLS,
        verbose_errors=False,
    )
