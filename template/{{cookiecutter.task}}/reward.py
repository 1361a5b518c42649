{% include cookiecutter.reward ~ "/reward.py" %}
