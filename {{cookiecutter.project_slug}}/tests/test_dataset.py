#:: include "task/" ~ cookiecutter.task ~ "/test_dataset.py" ::#
