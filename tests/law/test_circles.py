"""No circle of imports of any kind: those for types alone and those inside functions count as well."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.law.source import ROOT, product_files, tree

Graph = dict[str, set[str]]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def targets(path: Path, module: str) -> Iterator[str]:
    """Dotted names that the file imports, wherever the statement stands."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{source}.{alias.name}" for alias in node.names)


def import_graph() -> Graph:
    path_by_module = {module_of(path): path for path in product_files()}
    graph: Graph = {}
    for module, path in path_by_module.items():
        # A name that is no module was taken from the module before its last dot.
        found = (
            name if name in path_by_module else name.rpartition(".")[0] for name in targets(path, module)
        )
        graph[module] = {name for name in found if name in path_by_module and name != module}
    return graph


def reachable(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    ahead = [start]
    while ahead:
        for module in graph[ahead.pop()] - seen:
            seen.add(module)
            ahead.append(module)
    return seen


def circles(graph: Graph) -> list[list[str]]:
    """Groups of modules that reach each other."""
    reach = {module: reachable(graph, module) for module in graph}
    groups = {
        tuple(sorted(other for other in reach[module] if module in reach[other]))
        for module in graph
        if module in reach[module]
    }
    return sorted((list(group) for group in groups), key=len, reverse=True)


def described(graph: Graph, circle: list[str]) -> str:
    ties = [f"  {module} -> {name}" for module in circle for name in sorted(graph[module] & set(circle))]
    return "\n".join([f"circle of {len(circle)} modules:", *ties])


def test_no_circle_of_imports() -> None:
    graph = import_graph()
    found = circles(graph)
    assert not found, "\n".join(described(graph, circle) for circle in found)


def test_a_circle_is_found() -> None:
    graph: Graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "e"}, "e": set()}
    assert circles(graph) == [["b", "c"]]
