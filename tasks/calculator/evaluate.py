"""calculator's evaluation: the shared one, which plays episodes."""

from tasks.calculator.environment import Environment
from tasks.common.evaluation.main import main

if __name__ == "__main__":
    main(environment=Environment)
