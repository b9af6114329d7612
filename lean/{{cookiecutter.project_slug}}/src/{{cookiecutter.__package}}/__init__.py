"""{{ cookiecutter.description | quoted }}"""
