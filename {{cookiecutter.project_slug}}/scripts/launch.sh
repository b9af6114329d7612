#:: include "launcher/" ~ cookiecutter.launcher ~ ".sh" ::#
