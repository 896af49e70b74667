"""Private names of torch are in one file, so that a new version of it is met in one place."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "titan_like"


def private_names(text):
    """Names of torch with a part that begins with one underscore, imported or reached from an imported module."""
    modules, found = {}, []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                modules[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
                found += [alias.name] if alias.name.startswith("torch") else []
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                found.append(f"{node.module}.{alias.name}")
    for node in ast.walk(ast.parse(text)):
        parts, inner = [], node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and modules.get(inner.id, "").split(".")[0] == "torch":
            found.append(".".join([modules[inner.id], *reversed(parts)]))
    return {name for name in found if any(p.startswith("_") and not p.startswith("__") for p in name.split("."))}


def test_no_other_file_has_one():
    others = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "torch_private"]
    found = {str(path.relative_to(PACKAGE)): private_names(path.read_text(encoding="utf-8")) for path in others}
    assert {path: names for path, names in found.items() if names} == {}


# Methods of tuples and the standard library with an underscore, the numbers in torchao's float8 tensors, and methods of
# torch that our subclasses override.
PUBLIC_ENOUGH = {"_asdict", "_current_frames", "_data", "_exit", "_fields", "_make", "_replace", "_Unpickler"}
OVERRIDDEN = {"_apply", "_get_metadata_path", "_slice_file"}


def test_no_other_file_calls_a_private_method_of_an_object_of_torch():
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    ours = set()
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            ours.add(node.name)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            ours.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    foreign = {
        (path.parent.name, node.attr)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if node.attr not in ours | PUBLIC_ENOUGH | OVERRIDDEN
    }
    assert {folder for folder, _ in foreign} == {"torch_private"}, foreign
    table = (PACKAGE / "torch_private" / "__init__.py").read_text(encoding="utf-8")
    assert all(f".{name}`" in table for name in OVERRIDDEN)


def test_the_file_has_those_that_it_names():
    found = private_names((PACKAGE / "torch_private" / "__init__.py").read_text(encoding="utf-8"))
    assert {"torch.ops._c10d_functional", "torch._foreach_mul_", "torch._C._current_graph_task_id"} <= found
    assert len(found) >= 10
