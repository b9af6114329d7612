#:: extends "tracker/shared/followed.py" ::#
