#:: extends "tracker/base.py" ::#
