"""The product's source as the law tests read it: files, syntax trees and defined names."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ROOT / "danube"
GENERATED = (PRODUCT / "server" / "proto",)


@cache
def product_files() -> tuple[Path, ...]:
    """Python files of the product, without generated ones."""
    return tuple(
        sorted(
            path for path in PRODUCT.rglob("*.py") if not any(folder in path.parents for folder in GENERATED)
        )
    )


@cache
def repository_files() -> tuple[Path, ...]:
    """Text files that are, or are about to be, part of the repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.splitlines() if listed.returncode == 0 else []
    paths = [ROOT / name for name in names] or [path for path in ROOT.rglob("*") if ".venv" not in path.parts]
    return tuple(
        path for path in paths if path.is_file() and path.suffix not in {".bin", ".batch", ".segment"}
    )


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def name_of(path: Path) -> str:
    """The path inside the repository, for messages and exception lists."""
    return path.relative_to(ROOT).as_posix()


def nodes() -> Iterator[tuple[Path, ast.AST]]:
    """Every syntax node of the product with its file."""
    for path in product_files():
        for node in ast.walk(tree(path)):
            yield path, node


def dotted(node: ast.AST) -> str:
    """``a.b.c`` for a chain of names, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ""


def defined_names(path: Path) -> Iterator[tuple[str, int]]:
    """Names that the file itself gives to something: (name, line)."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
