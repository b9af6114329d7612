"""Print the next commands; change no files."""

import json

ANSWERS = json.loads(r"""{{ cookiecutter | tojson }}""")

print(f"""
{ANSWERS["project_slug"]} is ready. Next:

  cd {ANSWERS["project_slug"]}
  make setup    # .venv, git repository, pre-commit hook
  make train    # configs/default.yaml on this machine
  make test     # proves that splitting the work does not change the result
""")
