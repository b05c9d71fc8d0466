"""The pages that are made from the rules and the checklist: docs/review/rules.md and guide.md."""

from __future__ import annotations

from omnistage_review.checklist import ITEMS, TOPICS
from omnistage_review.registry import RULES

_RULES_HEAD = """# Review rules

{count} rules of [`omnistage-review`](README.md), by topic. *High* findings fail our own checks. Each rule has examples
that fail and that pass in [review_examples.py](../../tests/unit/review_examples.py). This page is what
`omnistage-review --rules` prints; `python tools/make_review_docs.py` writes it.
"""

_GUIDE_HEAD = """# Review guide

What to look at in a change to an inference system, by topic. An item names the rule that checks it; the others are
questions that only a human can answer. [How to review](README.md#four-phases) comes first.
`python tools/make_review_docs.py` writes this page from [checklist.py](../../omnistage_review/checklist.py), from which
reports take their checklists too.
"""


def rules_page() -> str:
    """All rules, as Markdown."""
    lines = [_RULES_HEAD.format(count=len(RULES))]
    for topic in TOPICS:
        rules = sorted((rule for rule in RULES.values() if rule.topic == topic), key=lambda rule: rule.id)
        if not rules:
            continue
        lines.append(f"## {topic[0].upper()}{topic[1:]}\n")
        for rule in rules:
            lines.append(f"### {rule.id} {rule.title}\n")
            scope = "; needs the whole file" if rule.whole_file else ""
            lines.append(f"*{rule.severity.value}{scope}.* {rule.why}\n\n**Fix:** {rule.fix}\n")
    return "\n".join(lines)


def guide_page() -> str:
    """The review guide, as Markdown."""
    lines = [_GUIDE_HEAD]
    for topic, lead in TOPICS.items():
        lines.append(f"## {topic[0].upper()}{topic[1:]}\n\n{lead}\n")
        for item in (item for item in ITEMS if item.topic == topic):
            links = ", ".join(f"[{name}](rules.md#{RULES[name].anchor})" for name in item.rules)
            lines.append(f"- {item.text} {links or '*(a human asks)*'}")
        lines.append("")
    return "\n".join(lines)
