"""Renders the check of a replay's answers, which cookiecutter.json cannot make. {{ cookiecutter | checked }}"""
