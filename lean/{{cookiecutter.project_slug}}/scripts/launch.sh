#:: include "launcher/" ~ cookiecutter.launcher ~ "/launch.sh" ::#
