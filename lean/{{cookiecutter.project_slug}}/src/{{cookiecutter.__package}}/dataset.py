#:: include "task/" ~ cookiecutter.task ~ "/dataset.py" ::#
