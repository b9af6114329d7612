#:: include "tracker/" ~ cookiecutter.tracker ~ ".py" ::#
