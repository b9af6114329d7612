#:: include "parallelism/" ~ cookiecutter.parallelism ~ "/plan.py" ::#
