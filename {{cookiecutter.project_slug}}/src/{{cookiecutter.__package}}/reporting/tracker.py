#:: include "tracker/" ~ cookiecutter.tracker ~ "/tracker.py" ::#
