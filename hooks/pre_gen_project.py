"""Renders what cookiecutter.json cannot make: the check of a replay's answers, and copies of the files that -f would
overwrite. {{ cookiecutter | checked }}{{ cookiecutter | set_aside }}"""
