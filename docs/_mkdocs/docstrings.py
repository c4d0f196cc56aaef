"""A griffe extension that turns docstrings into Markdown for mkdocstrings.

In a docstring, two backquotes mark code, a role such as ``:class:`` marks a name, and ``::`` marks
a block of code. A constant's docstring is the comment ``#:`` above the constant. The docstring of a
metric's field is the help text in the field's declaration.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`(~?)([\w.]+)`")
_LITERAL = re.compile(r"``(.+?)``", re.DOTALL)
_BLOCK = re.compile(r"^(.*)::\n\n((?:(?: {4}.*)?\n)+)", re.MULTILINE)
_SESSION = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class MarkdownDocstrings(griffe.Extension):
    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        if attr.docstring is None and (text := _comment_above(attr) or _help_in_declaration(attr)):
            attr.docstring = griffe.Docstring(text, parent=attr)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None and obj.path.startswith("kvtier_"):
            obj.docstring.value = to_markdown(obj.docstring.value, obj) + _unexplained_members(obj)


def to_markdown(text: str, owner: griffe.Object) -> str:
    text = _ROLE.sub(lambda role: _reference(role[2], bool(role[1]), owner), text)
    text = _LITERAL.sub(r"`\1`", text)
    text = _BLOCK.sub(_fenced, text + "\n")
    return _SESSION.sub(r"```pycon\n\g<0>\n```", text).rstrip()


def _comment_above(attribute: griffe.Attribute) -> str:
    """Return the ``#:`` comment above the attribute or above its group of lines."""
    above = attribute.module.source.splitlines()[: (attribute.lineno or 1) - 1]
    comment: list[str] = []
    for line in reversed(above):
        if line.strip().startswith("#:"):
            comment.insert(0, line.strip().removeprefix("#:").strip())
        elif comment or not line.strip():
            break
    return "\n".join(comment)


def _help_in_declaration(attribute: griffe.Attribute) -> str:
    """Return the help text in the call that declares the field."""
    if attribute.parent is not None and attribute.parent.is_class:
        for argument in getattr(attribute.value, "arguments", ()):
            if isinstance(argument, str) and argument.endswith((".'", '."')):
                return str(ast.literal_eval(argument))
    return ""


def _unexplained_members(owner: griffe.Object) -> str:
    """List an enumeration's members that have no docstring."""
    if not isinstance(owner, griffe.Class) or not {"Enum", "Flag"} & set(map(str, owner.bases)):
        return ""
    names = [
        f"`{name}`"
        for name, member in owner.members.items()
        if member.is_attribute and member.docstring is None
    ]
    return f"\n\nMembers: {', '.join(names)}." if names else ""


def _fenced(block: re.Match[str]) -> str:
    before, code = block[1], re.sub(r"^ {4}", "", block[2], flags=re.MULTILINE).strip("\n")
    return (f"{before}:\n\n" if before else "") + f"```python\n{code}\n```\n\n"


def _reference(name: str, last: bool, owner: griffe.Object) -> str:
    """Return a cross-reference, or plain code if the name belongs to Python.

    An unknown name stays a cross-reference, so that a strict build fails.
    """
    shown = name.rpartition(".")[2] if last else name
    path = _path_of(name, owner)
    first = path.partition(".")[0]
    if hasattr(builtins, first) or first in sys.stdlib_module_names:
        return f"`{shown}`"
    return f"[`{shown}`][{path}]"


def _path_of(name: str, owner: griffe.Object) -> str:
    """Return the path of the object that a name in a docstring refers to.

    If the object is an attribute without a docstring, return the path of its class.
    """
    first, *rest = name.split(".")
    scope: griffe.Object | griffe.Alias | None = owner
    while scope is not None and first not in scope.all_members:
        scope = scope.parent
    if scope is None:
        return name
    found = scope.all_members[first]
    try:
        for part in rest:
            found = found.all_members[part]
        target = found.final_target if isinstance(found, griffe.Alias) else found
    except (griffe.AliasResolutionError, KeyError):
        return name
    if target.docstring is None and target.parent is not None and target.parent.is_class:
        target = target.parent
    return target.path
