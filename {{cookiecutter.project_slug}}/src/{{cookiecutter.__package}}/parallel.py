#:: include "parallelism/" ~ cookiecutter.parallelism ~ ".py" ::#
