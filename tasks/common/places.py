"""Where things are: this package's own files, and the project whose tasks it runs."""

import importlib.metadata
import importlib.util
import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def _project() -> Path:
    """The folder whose ``tasks`` Python imports: a project, or a clone of this repository; else the working folder."""
    spec = importlib.util.find_spec("tasks")
    folders = spec.submodule_search_locations if spec else None
    return Path(next(iter(folders))).absolute().parent.resolve() if folders else Path.cwd()


def _python_path() -> str:
    """PYTHONPATH of our processes: the project, the folder of this package where it is not installed, the user's."""
    library, name = os.path.split(os.path.dirname(os.path.abspath(__file__)))
    installed = library.endswith(("site-packages", "dist-packages")) or name != "verl_tasks"  # editable: tasks/common
    own = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(":") if entry]
    return ":".join(dict.fromkeys([str(ROOT), *([] if installed else [library]), *own]))


def installed(package: str) -> str:
    """The version of ``package`` in this Python; empty where it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


ROOT = _project()
PYTHON_PATH = _python_path()
