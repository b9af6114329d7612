#:: include "task/" ~ cookiecutter.task ~ "/task.py" ::#
