"""What `tandem explain` shows of the reuse of a prompt: achieved and achievable, the nearest relative, and
the fate of the blocks that were computed."""

from __future__ import annotations

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cluster.cli.terminal import made_table
from cluster.proto.tandem.v1 import inference_pb2 as pb

_REASONS = {
    "space": "evicted: space was needed, and these were used least recently",
    "share": "evicted: their sharing group had more than its share",
    "offloaded": "moved to host memory with a sequence that had to wait",
    "purged": "purged by an operator",
    "corrupt": "dropped: the copy could not be read, or had a wrong checksum",
    "lost": "lost: the store of the node came back without them",
    "left": "gone with the replica",
    "": "removed",
}
_FATES = {
    pb.BLOCK_FATE_NEW: "never seen",
    pb.BLOCK_FATE_FORGOTTEN: "seen, and no longer anywhere; when they were removed is not remembered",
    pb.BLOCK_FATE_UNUSABLE: "their KV is there, but not the window or state to continue behind them",
}


def prompt_parts(explained: pb.ExplainResponse) -> list[RenderableType]:
    """Return the lines about the prompt, and a table of the last attempt's missed blocks; nothing before an
    attempt, or of a gateway that does not say."""
    prompt = explained.prompt
    if not explained.decisions or not prompt.block_tokens:
        return []
    last = explained.decisions[-1]
    parts: list[RenderableType] = [Text(f"{_shares(prompt, last)}\n{_relative(prompt)}\n")]
    if last.missed:
        parts.append(_missed_table(last, prompt.block_tokens))
    return parts


def _shares(prompt: pb.PromptReuse, last: pb.Decision) -> str:
    cached = f"{prompt.num_cached_tokens} cached ({_percent(prompt.num_cached_tokens, prompt.num_tokens)})"
    # A block that was computed between the decision and the start may be used, too.
    achievable = max(last.achievable_tokens, prompt.num_cached_tokens)
    could = f"{achievable} ({_percent(achievable, prompt.num_tokens)}) with a cache without a limit"
    return f"prompt: {prompt.num_tokens} tokens, {cached}; {could}"


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "0%"


def _relative(prompt: pb.PromptReuse) -> str:
    if not prompt.num_relative_tokens:
        return "nearest relative: none is remembered"
    name = escape(prompt.relative_id) if prompt.relative_id else "a request of another tenant"
    shared, block = prompt.num_shared_tokens, prompt.block_tokens
    if min(prompt.num_tokens, prompt.num_relative_tokens) - shared < block:
        shorter = "this prompt" if prompt.num_tokens <= prompt.num_relative_tokens else "that one"
        end = f"where the last full block of {shorter} ends"
    else:
        end = f"and they part between tokens {shared} and {shared + block}"
    return f"nearest relative: {name}, {prompt.num_relative_tokens} tokens; {shared} are the same, {end}"


def _missed_table(decision: pb.Decision, block_tokens: int) -> Table:
    where = decision.prefill or decision.decode
    table = made_table(f"computed at {where}", "tokens", "fate", numbers=("blocks",))
    for missed in decision.missed:
        first, end = missed.first * block_tokens, (missed.first + missed.num_blocks) * block_tokens
        table.add_row(f"{first} to {end}", fate_text(missed), str(missed.num_blocks))
    return table


def fate_text(missed: pb.MissedBlocks) -> str:
    """Return why blocks were not cached, in words."""
    places = ", ".join(f"{it.replica_id} ({it.tier})" for it in missed.places)
    if missed.fate == pb.BLOCK_FATE_REMOVED:
        ages = f"{missed.least_age_s:.1f} s"
        if missed.most_age_s - missed.least_age_s >= 0.1:
            ages = f"{missed.least_age_s:.1f} to {missed.most_age_s:.1f} s"
        return f"{_REASONS.get(missed.reason, missed.reason)}; {places}, {ages} before"
    if missed.fate == pb.BLOCK_FATE_ELSEWHERE:
        return f"elsewhere: {places}"
    if missed.fate == pb.BLOCK_FATE_EXPECTED:
        return f"being computed elsewhere: {places}"
    return _FATES.get(missed.fate, "not known")
