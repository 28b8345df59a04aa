"""Tutorials are notebooks that were executed: they hold what their files say, and can be executed again."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "docs" / "tutorials").glob("*.py"))


@pytest.fixture(scope="module")
def notebook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("notebook", ROOT / "docs" / ".site" / "notebook.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["notebook"] = module
    spec.loader.exec_module(module)
    return module


def name(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("path", FILES, ids=name)
def test_the_notebook_is_that_of_the_file(path: Path, notebook: ModuleType) -> None:
    kept = notebook.read(path.with_suffix(".ipynb"))
    assert notebook.sources(kept) == notebook.cells(path), f"run: make tutorials ({path.name} has changed)"
    assert any(cell.get("outputs") for cell in kept["cells"])


@pytest.mark.heavy
@pytest.mark.parametrize("path", FILES, ids=name)
def test_the_tutorial_runs(path: Path, notebook: ModuleType, tmp_path: Path) -> None:
    """In a new folder; as many outputs as were kept."""
    tutorial = notebook.cells(path)
    done = notebook.to_notebook(tutorial, notebook.execute(tutorial, tmp_path))
    kept = notebook.read(path.with_suffix(".ipynb"))
    assert len(notebook.printed(done)) == len(notebook.printed(kept))


def test_cells_run_in_turn_and_the_first_error_is_an_end(notebook: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "t.py"
    python, bash = "x = 2\nprint(x)\nx + 1\n", "# echo $((1 + 3)) > four\n# cat four\n"
    file.write_text(f"# %% [markdown]\n# # Title\n# %%\n{python}# %% [bash]\n{bash}")
    tutorial = notebook.cells(file)
    done = notebook.to_notebook(tutorial, notebook.execute(tutorial, tmp_path))
    assert notebook.printed(done) == ["2\n", "3", "4\n"]
    page = notebook.to_page(done, "t")
    assert page.startswith("# Title\n")
    assert "```bash\necho $((1 + 3)) > four" in page
    for wrong in ("# %%\n1 / 0\n", "# %% [bash]\n# exit 3\n"):
        file.write_text(wrong)
        with pytest.raises((ZeroDivisionError, RuntimeError)):
            notebook.execute(notebook.cells(file), tmp_path)
