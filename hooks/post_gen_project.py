"""Print the next commands; change no files."""

from pathlib import Path

print(f"""
{{ cookiecutter.project_slug }} is ready. Next:

  cd {Path.cwd()}
  make setup    # .venv, git repository, pre-commit hook
  make train    # configs/default.yaml on this machine
  make test     # tests on this machine that splitting the work does not change the result
""")
