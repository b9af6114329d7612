#:: include "parallelism/" ~ cookiecutter.parallelism ~ "/parallel.py" ::#
