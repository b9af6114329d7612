#:: include "task/" ~ cookiecutter.task ~ "/model.py" ::#
