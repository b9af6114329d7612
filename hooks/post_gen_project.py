"""Print the next commands; change no files."""

print("""
{{ cookiecutter.project_slug }} is ready. Next, in its folder:

  make setup    # .venv, git repository, pre-commit hook
  make train    # configs/default.yaml on this machine
  make test     # tests on this machine that splitting the work does not change the result
""")
