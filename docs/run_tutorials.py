"""Run the tutorials again and save what they print and draw: `make tutorials`. A test checks that it still holds."""

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent / "tutorials").glob("*.ipynb"))
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def execute(path: Path, folder: Path, then: str = "") -> nbformat.NotebookNode:
    """A notebook as it comes out of a new kernel in `folder`; a cell that fails raises. `then` is one more cell.

    The kernel has one thread, the commands of this environment and the settings of no user.
    """
    notebook = nbformat.read(path, as_version=4)
    if then:
        notebook.cells.append(nbformat.v4.new_code_cell(then))
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore:IProgress not found",  # tqdm asks for ipywidgets, for bars that nobody would save
        "IPYTHONDIR": str(folder / ".ipython"),
    }
    client = NotebookClient(
        notebook,
        timeout=300,
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        coalesce_streams=True,
        extra_arguments=["--log-level=ERROR"],
    )
    client.execute(env=env)
    notebook.metadata = nbformat.from_dict(METADATA)
    return notebook


if __name__ == "__main__":
    for path in NOTEBOOKS:
        with TemporaryDirectory() as folder:
            nbformat.write(execute(path, Path(folder)), path)
