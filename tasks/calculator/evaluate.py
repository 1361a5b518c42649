"""calculator's evaluation: the shared one, which plays episodes."""

from tasks.calculator.environment import Environment
from verl_tasks import evaluate

if __name__ == "__main__":
    evaluate(environment=Environment)
