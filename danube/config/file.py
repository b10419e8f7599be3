"""The YAML configuration file, read with its line numbers; the only place that imports yaml.

The file is parsed into nodes and walked by hand.  So every error has a line, repeated keys are noticed, and
each scalar reaches the setting's parser as it was written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import yaml

from danube.config import aliases as config_aliases
from danube.config.problems import Given, Problem, suggestion
from danube.config.sections import Setting
from danube.errors import ConfigInvalid
from danube.limits import MIB

FILE_BYTES_MAX: Final = 1 * MIB
_NULL_TAG = "tag:yaml.org,2002:null"


def read(path: Path, known: Mapping[str, Setting], problems: list[Problem]) -> Iterator[Given]:
    """Yield ``(key, text, origin)`` of every known key; add errors of the others to ``problems``."""
    origins: dict[str, str] = {}
    beside: tuple[str, str] | None = None
    for key, text, origin in _found(path, known, problems):
        if key == config_aliases.BESIDE:
            beside = (text, origin)
        elif key in origins:
            hint = "one of the two goes by another name of the key"
            problems.append(Problem(origin, f"{key} is given twice, first at {origins[key]}", hint))
        else:
            origins[key] = origin
            yield key, text, origin
    if beside is not None and "data_dir" not in origins:
        yield "data_dir", *beside


def _found(path: Path, known: Mapping[str, Setting], problems: list[Problem]) -> Iterator[Given]:
    root = _compose(path)
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        problems.append(Problem(_place(path, root), "the file is not a mapping of keys to values"))
        return
    sections = sorted({key.partition(".")[0] for key in known if "." in key} | set(config_aliases.SECTIONS))
    top = [*(key for key in known if "." not in key), *config_aliases.TOP, *sections]
    for name, node, value in _entries(path, root, top, problems):
        if name in config_aliases.TOP:
            for found in _scalar(path, name, value, problems):
                yield from config_aliases.top(*found, problems)
        elif name not in sections:
            yield from _scalar(path, name, value, problems)
        elif isinstance(value, yaml.MappingNode):
            inner = [key.partition(".")[2] for key in known if key.startswith(name + ".")]
            leaves = _leaves(path, value, inner + config_aliases.names(name), problems, name + ".")
            yield from config_aliases.translate(name, leaves, path.absolute().parent, problems)
        elif not _empty(value):
            problems.append(Problem(_place(path, node), f"{name} is a section, not a value"))


def _leaves(
    path: Path, node: yaml.MappingNode, allowed: list[str], problems: list[Problem], prefix: str
) -> Iterator[Given]:
    """``(key, text, origin)`` of the values in a section and in the sections inside it."""
    here = list(dict.fromkeys(name.partition(".")[0] for name in allowed))
    for key, key_node, value in _entries(path, node, here, problems, prefix):
        deeper = [name.partition(".")[2] for name in allowed if name.startswith(key + ".")]
        reason = config_aliases.REFUSED.get(prefix + key)
        if reason is not None:
            problems.append(Problem(_place(path, key_node), f"{prefix}{key} cannot be had here", reason))
        elif deeper and isinstance(value, yaml.MappingNode):
            yield from _leaves(path, value, deeper, problems, f"{prefix}{key}.")
        elif key in allowed or not deeper:
            yield from _scalar(path, prefix + key, value, problems)
        elif not _empty(value):
            problems.append(Problem(_place(path, key_node), f"{prefix}{key} is a section, not a value"))


def _compose(path: Path) -> yaml.Node | None:
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigInvalid(
            f"configuration file {path} cannot be read",
            why=error.strerror or str(error),
            hint="check --config",
        ) from None
    if len(content) > FILE_BYTES_MAX:
        raise ConfigInvalid(f"configuration file {path} is larger than {FILE_BYTES_MAX} bytes")
    try:
        return yaml.compose(content, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigInvalid(f"{path}{line}: not valid YAML", why=error.problem or str(error)) from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigInvalid(f"{path}: not valid YAML", why=str(error).splitlines()[0]) from None


def _entries(
    path: Path, node: yaml.MappingNode, allowed: list[str], problems: list[Problem], prefix: str = ""
) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """Yield ``(key, key node, value node)`` of a mapping's allowed keys, each once."""
    seen: set[str] = set()
    for key_node, value in node.value:
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "(not a word)"
        if key not in allowed:
            hint = suggestion(key, allowed) or f"known here: {', '.join(allowed)}"
            problems.append(Problem(_place(path, key_node), f"unknown key {prefix + key[:80]!r}", hint))
        elif key in seen:
            problems.append(Problem(_place(path, key_node), f"{prefix}{key} is given twice"))
        else:
            seen.add(key)
            yield key, key_node, value


def _scalar(path: Path, key: str, node: yaml.Node, problems: list[Problem]) -> Iterator[Given]:
    origin = _place(path, node)
    if isinstance(node, yaml.SequenceNode) and key in config_aliases.LISTS:
        inner = [one for each in node.value for one in _scalar(path, f"{key}[]", each, problems)]
        yield key, ",".join(text for _, text, _ in inner), origin
    elif isinstance(node, yaml.MappingNode) and key.removesuffix("[]") in config_aliases.RECORDS:
        words = [one for name, value in node.value for one in _scalar(path, str(name.value), value, problems)]
        yield key, " ".join(f"{name}={text}" for name, text, _ in words), origin
    elif not isinstance(node, yaml.ScalarNode):
        problems.append(Problem(origin, f"{key} takes one value, not a list or a mapping"))
    elif _empty(node):
        problems.append(Problem(origin, f"{key} has no value", "remove the line to take the default"))
    else:
        text = str(node.value)
        if key == "data_dir" and not text.startswith(("/", "~")):
            text = str(path.absolute().parent / text)
        yield key, text, origin


def _empty(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == _NULL_TAG


def _place(path: Path, node: yaml.Node) -> str:
    return f"{path}:{node.start_mark.line + 1}"
