"""Episodes of an environment of verifiers, which runs in a process of its own (docs/MULTI_TURN.md)."""

from tasks.common.rewards.verifiers import Package, environment_of

CONFIG = {{ cookiecutter.config | literal }}
PACKAGE = Package("{{ cookiecutter.env }}", CONFIG)
Environment = environment_of(PACKAGE)
