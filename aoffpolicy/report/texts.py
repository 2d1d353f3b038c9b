"""Groups with what was asked and answered."""

from __future__ import annotations

from collections.abc import Sequence

from aoffpolicy.report.svg import escape, figure
from aoffpolicy.samples.log import CompletionRecord, GroupRecord

TEXT_LIMIT = 2000
"""Characters shown of a prompt or completion."""
COMPLETIONS = 16
"""Shown of a group."""
COLUMNS = ("reward", "advantage", "tokens", "version", "completion")


def groups(records: Sequence[GroupRecord]) -> str:
    """Each group folded up under its figures."""
    if not records:
        return '<p class="none">no samples were kept (samples.max_bytes = 0), or none yet</p>'
    return "".join(map(_group, records))


def _group(group: GroupRecord) -> str:
    tokens = sum(c.tokens for c in group.completions)
    facts = (
        f"{figure(group.generate_s)} s by rollout {group.rollout}, scored in {figure(group.score_s)} s · "
        f"step {group.step} · {tokens} tokens · mean reward {figure(group.reward_mean)}"
    )
    shown = sorted(group.completions, key=lambda c: -c.tokens)[:COMPLETIONS]
    more = len(group.completions) - len(shown)
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    parts = [
        f'<details data-uid="{group.uid}"><summary>{escape(facts)}</summary>',
        f'<pre class="prompt">{_cut(group.prompt)}</pre>',
        f'<p><span class="dim">answer</span> {_cut(group.answer)}</p>' if group.answer else "",
        f'<div class="scroll"><table class="text"><tr>{head}</tr>{"".join(map(_completion, shown))}</table></div>',
        f'<p class="dim">{more} more completions in samples.jsonl</p>' if more else "",
        "</details>",
    ]
    return "".join(parts)


def _completion(c: CompletionRecord) -> str:
    oldest, newest = c.versions
    cells = (
        figure(c.reward),
        figure(c.advantage),
        str(c.tokens) + ("" if c.finish_reason == "stop" else " (cut)"),
        str(oldest) if oldest == newest else f"{oldest}-{newest}",
        _cut(c.text),
    )
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _cut(text: str) -> str:
    if len(text) <= TEXT_LIMIT:
        return escape(text)
    return f'{escape(text[:TEXT_LIMIT])}<span class="dim">… {len(text) - TEXT_LIMIT} characters more</span>'
