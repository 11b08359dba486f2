"""Imports run one way: a package may import those below it, never one above."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
# From the top down; a package may import itself and what stands behind it.
PACKAGES = (
    "experiments",
    "m2r2_jax",
    "m2r2_jax.serving",
    "m2r2_jax.training",
    "m2r2_jax.drafters",
    "m2r2_jax.decoding",
    "m2r2_jax.checkpoints",
    "m2r2_jax.text",
    "m2r2_jax.models",
    "m2r2_jax.ops",
    "pallas_kernels",
)
TOPS = ("experiments", "m2r2_jax", "pallas_kernels")
# Modules without imports of ours, which everybody may use.
LEAVES = {"m2r2_jax.files", "m2r2_jax._version"}


def package_of(module: str) -> str:
    """The longest package that a module's dotted name lies in."""
    return max((p for p in PACKAGES if f"{module}.".startswith(f"{p}.")), key=len)


def imported(path: Path) -> set[str]:
    """Modules of ours that a file imports, wherever in it the import stands."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return {name for name in names if name and name.split(".")[0] in TOPS}


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_every_folder_of_modules_has_its_place_in_the_order():
    folders = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for top in TOPS
        for path in (ROOT / top).rglob("*.py")
    }
    assert folders == set(PACKAGES)


def test_imports_run_downwards():
    wrong, seen = [], 0
    for top in TOPS:
        for path in (ROOT / top).rglob("*.py"):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            here = PACKAGES.index(package_of(module))
            for name in filter(is_module, imported(path) - LEAVES):
                seen += 1
                if PACKAGES.index(package_of(name)) < here:
                    wrong.append(f"{module} imports {name}")
    assert seen > 100
    assert not wrong


def test_leaves_import_nothing_of_ours():
    for name in LEAVES:
        assert not imported((ROOT / name.replace(".", "/")).with_suffix(".py"))
